"""The section `model` of a config, and the sizes that follow from it."""

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, model_validator

from decentral.core.config_values import Digest, OwnPath, Positive, PositiveFloat, Strict
from decentral.model.families import FAMILIES, Family

if TYPE_CHECKING:
    FamilyName = str
else:
    FamilyName = Literal[*FAMILIES]
MAX_WIDTH = 65_536
MAX_ROTARY = 1 << 24  # context times channels of a head: entries of each of a block's two tables of rotary positions
LEAST_APART = 1e-3  # of two bounds of turns, in fp32
Blocks = Annotated[tuple[Annotated[int, Field(ge=0, lt=1024)], ...], Field(max_length=128, strict=False)]
Divisors = Annotated[tuple[Annotated[float, Field(ge=1e-3, le=1e6)], ...], Field(max_length=128, strict=False)]
MAX_WINDOWED = 1 << 14  # context with a narrower window, whose mask has a byte for each pair of positions


class RopeScaling(Strict):
    """How rotary positions are stretched beyond those that a model was first trained with: model/rotary.py."""

    kind: Literal["linear", "dynamic", "llama3", "yarn", "longrope"]
    factor: Annotated[float, Field(ge=1, le=1e6)]
    positions: Annotated[int, Field(ge=2, le=1 << 20)] | None = None  # of the first training; None: `model.positions`
    low: PositiveFloat = 1.0  # turns within these positions up to which an angle is stretched in full
    # The turns from which on an angle is left as it was: the papers' values, which transformers takes as well.
    high: PositiveFloat = Field(default_factory=lambda given: 32.0 if given.get("kind") == "yarn" else 4.0)
    attention: PositiveFloat | None = None  # of queries and keys (yarn, longrope); None: it follows from `factor`
    truncate: bool = True  # yarn: round the two ends of the ramp to whole channel pairs
    short: Divisors = ()  # longrope: what each rate is divided by, in a sequence of at most `positions` ...
    long: Divisors = ()  # ... and in a longer one

    @model_validator(mode="after")
    def is_complete(self) -> "RopeScaling":
        """Refuse bounds that are too close, and divisors of other kinds than longrope."""
        if self.high < self.low * (1 + LEAST_APART):
            raise ValueError(f"low, {self.low}, must be below high, {self.high}")
        if (self.kind == "longrope") != bool(self.short and self.long) or len(self.short) != len(self.long):
            raise ValueError("longrope, and no other kind, has short and long, two lists of the same length")
        return self


class BlockOptions(Strict):
    """What some families' blocks have and Llama's lacks, under the names that config.json has for it.

    `Family.block` says which family has which of them; the multipliers are Granite's.
    """

    attention_bias: bool = False  # of queries, keys, values and output
    mlp_bias: bool = False
    unrotated: Blocks = ()  # without rotary positions
    partial_rotary_factor: Annotated[float, Field(gt=0, le=1)] = 1.0  # of a head's channels, those that are rotated
    embedding_multiplier: PositiveFloat = 1.0
    residual_multiplier: PositiveFloat = 1.0  # of what a branch adds
    attention_multiplier: PositiveFloat | None = None  # of queries times keys; None: 1 / sqrt(channels of a head)
    logits_scaling: PositiveFloat = 1.0  # what logits are divided by


class LoraConfig(Strict):
    """Adapters of low rank beside frozen matrices: model/lora.py. They alone are trained, and travel."""

    rank: Annotated[int, Field(gt=0, le=1024)] = 8
    alpha: PositiveFloat = 16.0  # an adapter's product is scaled by alpha / rank
    matrices: Literal["queries-values", "attention", "feed-forward", "all"] = "all"  # of each block, that have one

    @property
    def targets(self) -> tuple[str, ...]:
        """The names of these matrices inside a block."""
        attention, feed_forward = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")
        sets = {"queries-values": ("q_proj", "v_proj"), "attention": attention, "feed-forward": feed_forward}
        return sets.get(self.matrices, attention + feed_forward)


class ModelConfig(Strict):
    """A Llama-style decoder. Its size follows from `depth`, unless other keys say otherwise.

    With `from`, a Hugging Face folder, all of them but `context` are those of its config.json.
    """

    depth: Annotated[int, Field(gt=0, le=1024)] = 2
    width: Annotated[int, Field(gt=0, le=MAX_WIDTH)] | None = None  # 64 * depth
    heads: Positive | None = None  # one for every 32 channels up to width 256, above it one for every 64
    kv_heads: Positive | None = None  # as many as `heads`; fewer is grouped-query attention
    hidden: Positive | None = None  # 8/3 * width, rounded up to a multiple of 32
    vocabulary: Positive = 256
    context: Positive = 128
    rope_theta: Annotated[float, Field(ge=2, le=1e12)] = 10_000.0  # rates fall by this: at 1 yarn divides by zero
    rope_scaling: RopeScaling | None = None
    positions: Positive | None = None  # that the model is made for, as an export says; None: `context`
    family: FamilyName = "llama"
    block: BlockOptions = BlockOptions()
    head_channels: Positive | None = None  # width / heads
    norm_eps: Annotated[float, Field(gt=0, le=1)] = 1e-5
    window: Positive | None = None  # how many positions a token attends to, itself included; None: all before it
    # "package.module:function", which returns list[nn.Module]: a user's own model, whose code others have to trust
    layers: Annotated[str, Field(max_length=256)] | None = None
    lora: LoraConfig | None = None  # None: all weights are trained
    start_from: OwnPath | None = Field(default=None, alias="from")  # a Hugging Face folder on this peer's own disk
    weights: Digest | None = None  # of those that all peers start from; None: they are drawn, by `seed`

    @model_validator(mode="after")
    def shapes_fit(self) -> "ModelConfig":
        if self.layers is not None:
            if self.start_from is not None or self.weights is not None:
                raise ValueError("model.layers is code, which starts from no folder; leave model.from out")
            if self.lora is not None:
                raise ValueError("model.lora adapts the built-in model, and model.layers is code; leave one out")
            return self
        if (self.head_channels is None and self.d_model % self.n_heads) or self.d_head % 2 or self.d_rotary % 2:
            raise ValueError(f"width {self.d_model} must be an even multiple of heads {self.n_heads}")
        if self.n_heads % self.n_kv_heads:
            raise ValueError(f"heads {self.n_heads} must be a multiple of kv_heads {self.n_kv_heads}")
        if self.n_heads * self.d_head > MAX_WIDTH:
            raise ValueError(f"heads times head_channels must be at most {MAX_WIDTH}")
        if self.context * self.d_head > MAX_ROTARY:
            raise ValueError(f"context times channels of a head must be at most {MAX_ROTARY}; more heads, perhaps")
        if self.window is not None and not self.options.window:
            raise ValueError(f"family {self.family} has no window; mistral has one")
        for (name, value), (_, usual) in zip(self.block, BlockOptions(), strict=True):
            if value != usual and name not in self.options.block:
                raise ValueError(f"family {self.family} has no block.{name}")
        if self.rope_scaling is not None and self.rope_scaling.kind == "dynamic" and self.d_rotary < 4:
            raise ValueError("dynamic rope_scaling needs heads of at least 4 channels")
        if self.rope_scaling is not None and len(self.rope_scaling.long) not in (0, self.d_rotary // 2):
            raise ValueError(
                f"rope_scaling.long has {len(self.rope_scaling.long)} numbers; expected {self.d_rotary // 2}"
            )
        if self.windowed and self.context > MAX_WINDOWED:
            raise ValueError(f"context must be at most {MAX_WINDOWED} where the window, {self.window}, is narrower")
        return self

    @property
    def options(self) -> Family:
        return FAMILIES[self.family]

    @property
    def most_positions(self) -> int:
        """The longest text that the model reads when it generates."""
        return max(self.positions or 0, self.context)

    @property
    def windowed(self) -> bool:
        """Whether some token does not attend to all before it."""
        return self.window is not None and self.window < self.context

    @property
    def d_model(self) -> int:
        return self.width or 64 * self.depth

    @property
    def d_head(self) -> int:
        """Channels of a head."""
        return self.head_channels or self.d_model // self.n_heads

    @property
    def d_rotary(self) -> int:
        """Channels of a head that are rotated, the first ones."""
        return int(self.d_head * self.block.partial_rotary_factor)

    @property
    def d_queries(self) -> int:
        """Channels of all heads' queries together."""
        return self.n_heads * self.d_head

    @property
    def d_keys(self) -> int:
        """Channels of all keys together, and of all values."""
        return self.n_kv_heads * self.d_head

    @property
    def n_heads(self) -> int:
        return self.heads or max(1, self.d_model // (32 if self.d_model <= 256 else 64))

    @property
    def n_kv_heads(self) -> int:
        return self.kv_heads or self.n_heads

    @property
    def d_hidden(self) -> int:
        return self.hidden or -(-8 * self.d_model // (3 * 32)) * 32

    @property
    def layer_parameters(self) -> list[int]:
        """The parameters of embedding, blocks and head, without adapters. It knows nothing of a user's own `layers`."""
        width, table = self.d_model, self.vocabulary * self.d_model
        block = sum(self.block_matrices) + sum(self.block_vectors)
        return [table, *([block] * self.depth), width + table]

    @property
    def block_shapes(self) -> dict[str, tuple[int, int]]:
        """The inputs and outputs of a block's matrices."""
        width, queries, keys, hidden = self.d_model, self.d_queries, self.d_keys, self.d_hidden
        return {
            "q_proj": (width, queries),
            "k_proj": (width, keys),
            "v_proj": (width, keys),
            "o_proj": (queries, width),
            "gate_proj": (width, hidden),
            "up_proj": (width, hidden),
            "down_proj": (hidden, width),
        }

    @property
    def block_matrices(self) -> list[int]:
        """The sizes of a block's matrices: queries, keys, values, output, and the three of the feed-forward."""
        return [inputs * outputs for inputs, outputs in self.block_shapes.values()]

    @property
    def block_factors(self) -> list[int]:
        """The sizes of the adapters' factors in a block, two for each matrix that has one."""
        if self.lora is None:
            return []
        return [self.lora.rank * side for name in self.lora.targets for side in self.block_shapes[name]]

    @property
    def block_vectors(self) -> list[int]:
        """The sizes of a block's gains and biases."""
        queries, keys = self.d_queries, self.d_keys
        biases = [queries, keys, keys] if self.options.query_bias or self.block.attention_bias else []
        biases += [self.d_model] * self.block.attention_bias
        biases += [self.d_hidden, self.d_hidden, self.d_model] * self.block.mlp_bias
        norms = {"heads": [self.d_head, self.d_head], "all": [queries, keys]}
        return [self.d_model, self.d_model, *biases, *norms.get(self.options.query_norm, [])]
