// CUDA's words in C++, so that g++ compiles the kernels' unchanged source for a CPU. The 32 lanes of a warp are fibers:
// each runs until it shuffles, and goes on when all lanes have arrived there. A lane that is missing, or that shuffles
// at another place than the others, is a fault, as its value is undefined on a GPU.
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <ucontext.h>

#define __device__ static
#define __global__

using std::isfinite;

struct Place { unsigned x; };
static Place blockIdx, blockDim, threadIdx;

static int __float_as_int(float value) { int bits; memcpy(&bits, &value, 4); return bits; }
static float __int_as_float(int bits) { float value; memcpy(&value, &bits, 4); return value; }
static float __fdiv_rn(float a, float b) { return a / b; }
template <class T> static T min(T a, T b) { return b < a ? b : a; }
template <class T> static T max(T a, T b) { return a < b ? b : a; }

namespace lockstep {
const int WARP = 32, STACK = 1 << 16;
enum Fault { NONE, MISSING, APART };

static ucontext_t warp, lanes[WARP];
static char stacks[WARP][STACK];
static bool over[WARP];
static const void* at[WARP];  // where the lane waits
static uint64_t shown[WARP];
static int lane, fault;
static void (*body)();

static void run_lane() {
    body();
    over[lane] = true;
}

static void pause() { swapcontext(&lanes[lane], &warp); }

// Runs each lane to its next shuffle or its end, and returns how many wait.
static int advance(unsigned first) {
    int waiting = 0;
    for (lane = 0; lane < WARP; lane++) {
        if (over[lane]) continue;
        threadIdx.x = first + lane;
        swapcontext(&warp, &lanes[lane]);
        waiting += !over[lane];
    }
    return waiting;
}

static void run_warp(unsigned first) {
    for (int i = 0; i < WARP; i++) {
        over[i] = false;
        getcontext(&lanes[i]);
        lanes[i].uc_stack.ss_sp = stacks[i];
        lanes[i].uc_stack.ss_size = STACK;
        lanes[i].uc_link = &warp;
        makecontext(&lanes[i], run_lane, 0);
    }
    while (const int waiting = advance(first)) {
        if (waiting < WARP) fault = MISSING;
        for (int i = 1; i < WARP && !fault; i++)
            if (at[i] != at[0]) fault = APART;
        if (fault) return;
    }
}

static int run(unsigned grid, unsigned block, void (*kernel)()) {
    fault = NONE;
    body = kernel;
    blockDim.x = block;
    for (blockIdx.x = 0; blockIdx.x < grid; blockIdx.x++)
        for (unsigned first = 0; first < block && !fault; first += WARP) run_warp(first);
    return fault;
}
}  // namespace lockstep

template <class T> __attribute__((noinline)) static T __shfl_xor_sync(unsigned mask, T value, int other) {
    using namespace lockstep;
    memcpy(&shown[lane], &value, sizeof value);
    at[lane] = __builtin_return_address(0);
    if (mask != 0xffffffffu) fault = MISSING;
    pause();
    memcpy(&value, &shown[lane ^ other], sizeof value);
    pause();  // no lane shows its next value before all have read this one
    return value;
}
