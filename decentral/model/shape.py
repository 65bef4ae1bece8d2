"""The section `model` of a config (`ModelConfig`), and the sizes that follow from it."""

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, model_validator
from pydantic.json_schema import SkipJsonSchema

from decentral.core.config_values import Digest, OwnPath, Positive, PositiveFloat, Strict
from decentral.model.families import FAMILIES, Family

if TYPE_CHECKING:
    FamilyName = str
else:
    FamilyName = Literal[*FAMILIES]
MAX_WIDTH = 65_536  # a hidden state, and all heads together, have at most this many channels
MAX_ROTARY = 1 << 24  # context times channels of a head is at most this, since each block has a table of that size
LEAST_APART = 1e-3  # fp32 divides by `high` - `low`, so `high` must exceed `low` by at least this share of `low`
Blocks = Annotated[tuple[Annotated[int, Field(ge=0, lt=1024)], ...], Field(max_length=128, strict=False)]
Divisors = Annotated[tuple[Annotated[float, Field(ge=1e-3, le=1e6)], ...], Field(max_length=128, strict=False)]
MAX_WINDOWED = 1 << 14  # longest context with windowed attention, since its mask has a byte for each pair of positions


class RopeScaling(Strict):
    """Settings that slow the rotation of positions, for texts longer than in the first training; null: no slowing."""

    kind: Literal["linear", "dynamic", "llama3", "yarn", "longrope"]
    """Method of slowing, as `rope_type` of transformers names it."""
    factor: Annotated[float, Field(ge=1, le=1e6)]
    """Longest text of the model over the longest text of its first training (`positions`). Unit: factor."""
    positions: Annotated[int, Field(ge=2, le=1 << 20)] | None = None
    """Longest text of the first training; null: `model.positions`, else `model.context`. Unit: tokens."""
    low: PositiveFloat = 1.0
    """A pair of channels that turns at most this often in `positions` is slowed by all of `factor` (llama3, yarn).
    Unit: turns."""
    high: PositiveFloat = Field(default_factory=lambda given: 32.0 if given.get("kind") == "yarn" else 4.0)
    """A pair that turns at least this often in `positions` is not slowed; by default 32 for yarn, 4 for llama3.
    Unit: turns."""
    attention: PositiveFloat | None = None
    """Multiplier of the rotated queries and keys (yarn, longrope); null: computed from `factor`. Unit: factor."""
    truncate: bool = True
    """Round the indices of the pairs at which slowing begins and is complete to whole numbers (yarn)."""
    short: Divisors = ()
    """For each pair, the divisor of its angle per token in texts of at most `positions` tokens (longrope)."""
    long: Divisors = ()
    """For each pair, the divisor of its angle per token in longer texts (longrope)."""

    @model_validator(mode="after")
    def is_complete(self) -> "RopeScaling":
        """Raise ValueError if `low` is not below `high`, or `short` and `long` do not fit the kind."""
        if self.high < self.low * (1 + LEAST_APART):
            raise ValueError(f"low ({self.low}) must be less than high ({self.high})")
        if (self.kind == "longrope") != bool(self.short and self.long) or len(self.short) != len(self.long):
            raise ValueError("kind longrope needs lists short and long of equal length; other kinds must omit both")
        return self


class BlockOptions(Strict):
    """Options of blocks, each supported only by some families, named as in config.json. Llama supports the biases."""

    attention_bias: bool = False
    """Whether the projections to queries, keys, values and attention output have biases."""
    mlp_bias: bool = False
    """Whether the matrices of the feed-forward have biases."""
    unrotated: Blocks = ()
    """Indices of the blocks without rotary positions; the first block is 0 (smollm3)."""
    partial_rotary_factor: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of a head's channels that is rotated (phi3). Unit: share of 1."""
    embedding_multiplier: PositiveFloat = 1.0
    """Multiplier of the embedding (granite). Unit: factor."""
    residual_multiplier: PositiveFloat = 1.0
    """Multiplier of the outputs of attention and feed-forward before the residual addition (granite). Unit: factor."""
    attention_multiplier: PositiveFloat | None = None
    """Multiplier of the products of queries and keys (granite); null: 1 / sqrt(channels of a head). Unit: factor."""
    logits_scaling: PositiveFloat = 1.0
    """Divisor of the logits (granite). Unit: factor."""


class LoraConfig(Strict):
    """Low-rank adapters (LoRA) beside frozen matrices. Only the adapters are trained and sent. null: no adapters."""

    rank: Annotated[int, Field(gt=0, le=1024)] = 8
    """Rank of an adapter: rows of its first factor, columns of its second. Unit: rows."""
    matrices: Literal["queries-values", "attention", "feed-forward", "all"] = "all"
    """Matrices of a block that get adapters."""

    @model_validator(mode="before")
    @classmethod
    def drop_alpha(cls, given: object) -> object:
        """Accept the key `alpha` of earlier releases if it is twice the rank, and ignore it."""
        if not isinstance(given, dict) or "alpha" not in given:
            return given
        if (alpha := given["alpha"]) != (twice := 2 * given.get("rank", 8)):
            raise ValueError(f"alpha must be {twice} (twice the rank) in this release, but is {str(alpha)[:30]}")
        return {key: value for key, value in given.items() if key != "alpha"}

    @property
    def alpha(self) -> float:
        """The product of an adapter is scaled by alpha / rank, which is always 2."""
        return 2.0 * self.rank

    @property
    def targets(self) -> tuple[str, ...]:
        """Names of the matrices that have adapters, as they are called inside a block."""
        attention, feed_forward = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")
        sets = {"queries-values": ("q_proj", "v_proj"), "attention": attention, "feed-forward": feed_forward}
        return sets.get(self.matrices, attention + feed_forward)


class ModelConfig(Strict):
    """A Llama-style decoder. Sizes that are not given follow from `depth`.

    If `from` names a Hugging Face folder, the folder's config.json gives all keys except `context`.
    """

    depth: Annotated[int, Field(gt=0, le=1024)] = 2
    """Blocks between embedding and head. Unit: blocks."""
    width: Annotated[int, Field(gt=0, le=MAX_WIDTH)] | None = None
    """Channels of the hidden values; null: 64 * depth. Unit: channels."""
    heads: Positive | None = None
    """Attention heads; null: one for every 32 channels up to width 256, above it one for every 64. Unit: heads."""
    kv_heads: Positive | None = None
    """Heads of keys and values; null: as many as `heads`; fewer: grouped-query attention. Unit: heads."""
    hidden: Positive | None = None
    """Channels inside the feed-forward; null: 8/3 * width, rounded up to a multiple of 32. Unit: channels."""
    vocabulary: Positive = 256
    """Tokens that the model knows; 256 where a token is a byte. Unit: tokens."""
    context: Positive = 128
    """Length of a training sequence. Unit: tokens."""
    rope_theta: Annotated[float, Field(ge=2, le=1e12)] = 10_000.0  # 1 is excluded, since yarn divides by its logarithm
    """Base of the rotary positions: pair f of a head's E rotated channels turns by rope_theta^(-2f/E) radians a token.
    Unit: none."""
    rope_scaling: RopeScaling | None = None
    positions: Positive | None = None
    """Longest text that the model reads, written to an export's config.json; null: `context`. Unit: tokens."""
    family: FamilyName = "llama"
    """Model family of transformers: decides which keys of `block` are allowed, and the form of an export."""
    block: BlockOptions = BlockOptions()
    head_channels: Positive | None = None
    """Channels of a head; null: width / heads. Unit: channels."""
    norm_eps: Annotated[float, Field(gt=0, le=1)] = 1e-5
    """Constant that RMSNorm adds to the mean square before the square root. Unit: none."""
    window: Positive | None = None
    """Number of latest tokens that a token attends to, itself included (mistral, phi3); null: all. Unit: tokens."""
    layers: Annotated[str, Field(max_length=256)] | None = None
    """Code of the user's own model, `package.module:function`, which returns list[nn.Module]; all peers run this code.
    null: the built-in model."""
    bottleneck: Positive | None = None
    """Channels of the hidden values that blocks change and routes send; the others are fixed features of the token.
    null: all channels. Unit: channels."""
    lora: LoraConfig | None = None
    start_from: OwnPath | None = Field(default=None, alias="from")
    """Hugging Face folder on this peer's own disk that the run starts from; null: weights are sampled by `seed`."""
    weights: SkipJsonSchema[Digest | None] = None  # of the weights from which all peers start; `sealed` sets it

    @model_validator(mode="after")
    def shapes_fit(self) -> "ModelConfig":
        """Raise ValueError if two keys contradict each other, or the family does not support a key."""
        if self.layers is not None:
            if self.start_from is not None or self.weights is not None:
                raise ValueError("model.layers (your own code) cannot start from a folder's weights; omit model.from")
            if self.lora is not None:
                raise ValueError("model.lora works only with the built-in model; omit model.lora or model.layers")
            if self.bottleneck is not None:
                raise ValueError("model.bottleneck works only with the built-in model; omit it, or model.layers")
            return self
        self._check_bottleneck()
        if (self.head_channels is None and self.d_model % self.n_heads) or self.d_head % 2 or self.d_rotary % 2:
            raise ValueError(f"width {self.d_model} must be an even multiple of heads {self.n_heads}")
        if self.n_heads % self.n_kv_heads:
            raise ValueError(f"heads {self.n_heads} must be a multiple of kv_heads {self.n_kv_heads}")
        if self.n_heads * self.d_head > MAX_WIDTH:
            raise ValueError(f"heads times head_channels is {self.d_queries}; expected at most {MAX_WIDTH}")
        if self.context * self.d_head > MAX_ROTARY:
            product = f"context {self.context} times {self.d_head} channels of a head is {self.context * self.d_head}"
            raise ValueError(f"{product}; expected at most {MAX_ROTARY}; use a shorter context or more heads")
        if self.window is not None and not self.options.window:
            raise ValueError(f"family {self.family} does not support window; omit window, or use family mistral")
        for (name, value), (_, usual) in zip(self.block, BlockOptions(), strict=True):
            if value != usual and name not in self.options.block:
                raise ValueError(f"family {self.family} does not support block.{name}; omit block.{name}")
        if self.rope_scaling is not None and self.rope_scaling.kind == "dynamic" and self.d_rotary < 4:
            raise ValueError(f"dynamic rope_scaling needs at least 4 rotated channels in a head; got {self.d_rotary}")
        if self.rope_scaling is not None and len(self.rope_scaling.long) not in (0, self.d_rotary // 2):
            raise ValueError(
                f"rope_scaling.long has {len(self.rope_scaling.long)} numbers; expected {self.d_rotary // 2}"
            )
        if self.windowed and self.context > MAX_WINDOWED:
            raise ValueError(f"context {self.context} must be at most {MAX_WINDOWED} if window is less than context")
        return self

    def _check_bottleneck(self) -> None:
        if self.bottleneck is None:
            return
        if self.bottleneck >= self.d_model:
            raise ValueError(f"bottleneck {self.bottleneck} must be less than width {self.d_model}")
        if self.start_from is not None or self.weights is not None or self.lora is not None:
            raise ValueError("model.bottleneck needs a model that starts from nothing; omit model.from and model.lora")
        if self.family != "llama":
            raise ValueError(f"family {self.family} does not support bottleneck; use family llama")

    @property
    def options(self) -> Family:
        """The options of the model's family."""
        return FAMILIES[self.family]

    @property
    def most_positions(self) -> int:
        """The number of tokens of the longest text that the model generates, including the prompt."""
        return max(self.positions or 0, self.context)

    @property
    def windowed(self) -> bool:
        """Whether the window is shorter than the context."""
        return self.window is not None and self.window < self.context

    @property
    def d_model(self) -> int:
        """The width of hidden states."""
        return self.width or 64 * self.depth

    @property
    def d_written(self) -> int:
        """The number of channels of hidden states that blocks change; all, unless the model has a bottleneck."""
        return self.bottleneck or self.d_model

    @property
    def d_head(self) -> int:
        """The number of channels of a head."""
        return self.head_channels or self.d_model // self.n_heads

    @property
    def d_rotary(self) -> int:
        """The number of channels of a head that are rotated; these are the head's first channels."""
        return int(self.d_head * self.block.partial_rotary_factor)

    @property
    def d_queries(self) -> int:
        """The width of all heads' queries together."""
        return self.n_heads * self.d_head

    @property
    def d_keys(self) -> int:
        """The width of all heads' keys together, which is also the width of all heads' values together."""
        return self.n_kv_heads * self.d_head

    @property
    def n_heads(self) -> int:
        """The number of query heads."""
        return self.heads or max(1, self.d_model // (32 if self.d_model <= 256 else 64))

    @property
    def n_kv_heads(self) -> int:
        """The number of key-value heads."""
        return self.kv_heads or self.n_heads

    @property
    def d_hidden(self) -> int:
        """The width of the hidden layer of a block's feed-forward network."""
        return self.hidden or -(-8 * self.d_model // (3 * 32)) * 32

    @property
    def layer_parameters(self) -> list[int]:
        """The number of parameters of each built-in layer (embedding, blocks, head) without adapters."""
        block = sum(self.block_matrices) + sum(self.block_vectors)
        table, head = self.vocabulary * self.d_written, self.d_model + self.vocabulary * self.d_model
        return [table, *([block] * self.depth), head]

    @property
    def layer_flops(self) -> list[float]:
        """The FLOPs per token, forward and backward, of each built-in layer (embedding, blocks, head)."""
        flops = [2.0 * parameters for parameters in self.layer_parameters]
        flops[0] = 2.0 * self.d_model  # the embedding only looks a row up
        reach = min(self.window or self.context, self.context)
        attended = reach - reach**2 / (2 * self.context)  # mean number of positions to which a token attends
        scores = 4 * attended * self.d_queries  # attention scores, and their products with the values
        return [3 * (one + scores) if 0 < at <= self.depth else 3 * one for at, one in enumerate(flops)]

    @property
    def block_shapes(self) -> dict[str, tuple[int, int]]:
        """The (inputs, outputs) of each matrix of a block, by the matrix's name inside the block."""
        width, queries, keys, hidden = self.d_model, self.d_queries, self.d_keys, self.d_hidden
        written = self.d_written
        return {
            "q_proj": (width, queries),
            "k_proj": (width, keys),
            "v_proj": (width, keys),
            "o_proj": (queries, written),
            "gate_proj": (width, hidden),
            "up_proj": (width, hidden),
            "down_proj": (hidden, written),
        }

    @property
    def block_matrices(self) -> list[int]:
        """The number of elements of each matrix of a block, in the order of `block_shapes`."""
        return [inputs * outputs for inputs, outputs in self.block_shapes.values()]

    @property
    def block_factors(self) -> list[int]:
        """The number of elements of each adapter factor of a block: two factors for each matrix with an adapter."""
        if self.lora is None:
            return []
        return [self.lora.rank * side for name in self.lora.targets for side in self.block_shapes[name]]

    @property
    def block_vectors(self) -> list[int]:
        """The number of elements of each gain and bias of a block."""
        queries, keys = self.d_queries, self.d_keys
        biases = [queries, keys, keys] if self.options.query_bias or self.block.attention_bias else []
        biases += [self.d_written] * self.block.attention_bias
        biases += [self.d_hidden, self.d_hidden, self.d_written] * self.block.mlp_bias
        norms = {"heads": [self.d_head, self.d_head], "all": [queries, keys]}
        return [self.d_model, self.d_model, *biases, *norms.get(self.options.query_norm, [])]
