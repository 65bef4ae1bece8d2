"""Choose what glibc does with the memory of freed CPU tensors; without glibc, these functions do nothing."""

import ctypes

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8
RETURNED_BYTES = 1 << 20  # after `give_back_what_is_freed`, glibc returns larger freed tensors to the system at once
# A peer that trains a large model with Muon keeps freed tensors up to this size: oneDNN's products allocate and free
# 1,300 buffers of 1.2 MB in each step of 85 M parameters.
PRODUCT_BYTES = 2 << 20
KEPT_BYTES = 16 << 20  # after `keep_what_is_freed`, glibc keeps freed tensors up to this size


def give_back_what_is_freed(ranks: int = 1) -> None:
    """Make this process return freed CPU tensors above RETURNED_BYTES to the system at once.

    By default glibc keeps freed tensors that are smaller than a threshold, and each larger tensor that is freed raises
    the threshold, up to 32 MiB. With the default, a process took 1.4 times the memory of its layers after some
    micro-batches. On a system without glibc, this does nothing.

    Args:
        ranks: The number of ranks that divide each tensor; the limit is divided by it.
    """
    _mallopt((M_MMAP_THRESHOLD, RETURNED_BYTES // ranks))


def keep_what_is_freed(up_to_bytes: int = KEPT_BYTES) -> None:
    """Make this process keep freed CPU tensors of up to this size, since the next step allocates the same sizes.

    Call it in a peer that holds the whole model. By default glibc shrinks the training thread's heap again and again,
    which costs ten thousand new memory pages per second and 3% of the training speed (measured with 0.47 M parameters).
    """
    _mallopt((M_ARENA_MAX, 1), (M_MMAP_THRESHOLD, up_to_bytes), (M_TRIM_THRESHOLD, 1 << 30))


def return_free_pages() -> None:
    """Return the pages of the heap that hold nothing to the system; without glibc, do nothing.

    After `keep_what_is_freed`, the heap keeps what a merge or a join needed for a moment: 60 to 200 MB with 85 M
    parameters. The call takes 0.02 s, and training then allocates anew what it needs.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _mallopt(*options: tuple[int, int]) -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for parameter, value in options:
            mallopt(parameter, value)
