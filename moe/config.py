"""A recipe: small frozen sections, one a concern, checked before anything heavy loads (this file needs no torch).

    YAML file --extends--> parent        command line > file > parent > default
         \\______ merge ______/          `load` returns the Run and where each value came from
                   |
                 Run.check(world)        what fits one by one but not together: one line, what, got, needed, fix

`Run` is also the library's entry: `train(Run(...))` never reads argv.
"""

from __future__ import annotations

import json
import math
import reprlib
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator

from parallel.errors import BadInput, did_you_mean
from parallel.mesh import Degrees, check_world, divisors

_LARGEST = 2**40
RECIPES = Path(__file__).resolve().parent.parent / "recipes"


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=(), allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _plain(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse what pydantic lets pass: true for a number (`steps: yes` would be 1), and numbers so large that checks would not end."""
        if isinstance(value, bool) and cls.model_fields[str(info.field_name)].annotation is not bool:
            raise ValueError("a number or a name, not true or false")
        if isinstance(value, int) and abs(value) > _LARGEST:
            raise ValueError(f"at most {_LARGEST}")
        return value


class Model(Section):
    """The decoder-only Transformer around the experts."""

    vocab_size: int | None = Field(None, gt=0, description="null: the tokenizer's")
    num_layers: int = Field(4, gt=0)
    d_model: int = Field(256, gt=0)
    num_heads: int = Field(4, gt=0)
    num_kv_heads: int | None = Field(None, gt=0, description="grouped-query attention; null: as many as num_heads")
    head_size: int | None = Field(None, gt=0, description="null: d_model / num_heads")
    d_ff: int = Field(1024, gt=0)
    ffn: Literal["relu", "gelu", "geglu", "swiglu"] = "gelu"
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    positions: Literal["rotary", "t5"] = Field("rotary", description="t5: relative position bias, 32 buckets")
    max_length: int = Field(256, gt=0, description="tokens in one sequence")
    moe_every: int = Field(0, ge=0, description="every n-th layer has experts (2: layers 1, 3, ...); 0: dense")
    moe_layers: tuple[int, ...] | None = Field(None, description="layers with experts by number, instead of moe_every")
    tied_embeddings: bool = True
    dropout: float = Field(0.0, ge=0, lt=1)
    init_scale: float = Field(1.0, gt=0, description="s of sigma = sqrt(s / fan_in), truncated normal; Switch: 0.1")

    def layers_with_experts(self) -> tuple[int, ...]:
        if self.moe_layers is not None:
            return self.moe_layers
        return tuple(range(self.moe_every - 1, self.num_layers, self.moe_every)) if self.moe_every else ()


class Experts(Section):
    """The feed-forward networks of one MoE layer."""

    num_experts: int = Field(8, gt=0)
    d_ff: int | None = Field(None, gt=0, description="null: model.d_ff")
    ffn: Literal["relu", "gelu", "geglu", "swiglu"] | None = Field(None, description="null: model.ffn")
    shared: int = Field(0, ge=0, description="experts that every token passes, as one wider network")
    dropout: float = Field(0.0, ge=0, lt=1, description="inside the experts; Switch fine-tunes with 0.4")
    kernels: Literal["auto", "reference", "cpu"] = "auto"


class Router(Section):
    """Who goes where: `switch` is top-1 with the gate as it is; `gshard` and `glam` are top-2 with renormalised gates."""

    preset: Literal["switch", "gshard", "glam"] = "switch"
    group: Literal["sequence", "rank"] | int = Field(
        "sequence", description="tokens that share a capacity: one sequence, n sequences, or all that a rank holds (not layout-free)"
    )
    capacity_factor: float | None = Field(1.25, gt=0, description="null: dropless")
    eval_capacity_factor: float | None = Field(None, gt=0, description="null: dropless")
    min_capacity: int = Field(4, ge=0)
    jitter: float = Field(0.0, ge=0, lt=1, description="the router's input times uniform(1 - jitter, 1 + jitter), train only")
    second: Literal["preset", "always", "random"] = Field("preset", description="whether the second expert is always used (gshard: random)")
    balance_weight: float = Field(0.01, ge=0, description="Switch eq. 4, summed over layers")
    z_weight: float = Field(0.0, ge=0, description="ST-MoE: 0.001")

    @property
    def num_choices(self) -> int:
        return 1 if self.preset == "switch" else 2

    @property
    def random_second(self) -> bool:
        return self.num_choices == 2 and (self.second == "random" or (self.second == "preset" and self.preset == "gshard"))


class Parallel(Section):
    """Ways to split the work; `auto` dp fills the processes there are, `auto` ep is the largest that divides dp and the experts."""

    dp: int | Literal["auto"] = "auto"
    ep: int | Literal["auto"] = "auto"
    etp: Literal[1] = 1
    tp: Literal[1] = 1
    sp: Literal[1] = 1
    pp: Literal[1] = 1


class Sharding(Section):
    kind: Literal["ddp", "zero"] = "ddp"
    stage: Literal[1] = Field(1, description="of zero")


class Tensor(Section):
    kind: Literal["1d"] = "1d"


class Sequence(Section):
    kind: Literal["none"] = "none"


class Pipeline(Section):
    schedule: Literal["1f1b"] = "1f1b"
    microbatches: int = Field(1, gt=0, description="each rank's share of the batch is cut into so many; gradients accumulate")
    chunks: Literal[1] = 1


class Recompute(Section):
    kind: Literal["none"] = "none"


class Precision(Section):
    """One policy for dense and sparse: parameters live in `master`, matrix products run in `compute`, everything that sums is fp32."""

    compute: Literal["auto", "fp32", "bf16", "fp16"] = Field("fp32", description="auto: bf16 if every processor has it, else fp32")
    master: Literal["fp32", "bf16"] = "fp32"
    loss_scale: Literal["none", "dynamic"] | float = "none"


class Data(Section):
    source: Literal["python_stdlib", "text", "jsonl"] = Field("python_stdlib", description="text and jsonl need path")
    path: str | None = Field(None, description="a file or folder of text or JSONL")
    text_key: str = Field("text", description="the field of a JSONL line that holds the text")
    tokenizer: Literal["bytes", "bpe"] = "bytes"
    vocab_size: int = Field(4096, gt=256, description="of the bpe tokenizer")
    validation_share: float = Field(0.05, gt=0, lt=1, description="of the files")


class Optimizer(Section):
    """AdamW; no decay on norms, biases and the router."""

    lr: float = Field(1e-3, gt=0)
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.95, ge=0, lt=1)
    eps: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.1, ge=0)
    warmup_steps: int = Field(50, ge=0)
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    decay_share: float = Field(0.2, gt=0, le=1, description="wsd: the last share of the steps, where the rate falls")
    min_lr_share: float = Field(0.1, ge=0, le=1)
    clip_norm: float | None = Field(1.0, gt=0)


class Train(Section):
    steps: int = Field(300, gt=0)
    global_batch: int = Field(32, gt=0, description="sequences in one step, over all ranks and micro-batches")
    eval_every: int = Field(100, ge=0, description="steps; 0: only at the end")
    eval_sequences: int = Field(64, gt=0)
    save_every: int = Field(100, ge=0, description="steps; 0: only at the end")
    keep: int = Field(2, gt=0, description="newest checkpoints kept")
    seed: int = Field(0, ge=0)
    on_nan: Literal["skip", "stop"] = Field("skip", description="a step whose gradient is not finite")
    max_skips: int = Field(20, gt=0, description="skipped steps in a row before the run stops (dynamic loss scale: at its floor)")


class Run(Section):
    """A whole recipe."""

    model: Model = Model()
    experts: Experts = Experts()
    router: Router = Router()
    degrees: Parallel = Parallel()
    sharding: Sharding = Sharding()
    tensor: Tensor = Tensor()
    sequence: Sequence = Sequence()
    pipeline: Pipeline = Pipeline()
    recompute: Recompute = Recompute()
    precision: Precision = Precision()
    data: Data = Data()
    optimizer: Optimizer = Optimizer()
    train: Train = Train()

    @property
    def vocab_size(self) -> int:
        return self.model.vocab_size or (256 if self.data.tokenizer == "bytes" else self.data.vocab_size)

    def resolve(self, world_size: int) -> Run:
        """The same run with `auto` degrees made numbers for so many processes."""
        dp = world_size if self.degrees.dp == "auto" else self.degrees.dp
        ep = self.degrees.ep
        if ep == "auto":
            ep = math.gcd(dp, self.experts.num_experts) if self.model.layers_with_experts() else 1
        return self.model_copy(update={"degrees": self.degrees.model_copy(update={"dp": dp, "ep": ep})})

    def mesh_degrees(self) -> Degrees:
        """The resolved degrees; call `resolve` first."""
        d = self.degrees
        if d.dp == "auto" or d.ep == "auto":
            raise BadInput("degrees", got="auto", needed="numbers", fix="call run.resolve(world_size) first")
        return Degrees(dp=d.dp, pp=d.pp, tp=d.tp, sp=d.sp, ep=d.ep, etp=d.etp)

    def check(self, world_size: int) -> Run:
        """Resolve for so many processes and refuse what cannot work together. Raises BadInput."""
        run = self.resolve(world_size)
        _check_model(run)
        _check_experts(run)
        _check_precision(run)
        _check_data(run)
        _check_batch(run)
        check_world(run.mesh_degrees(), world_size)
        return run


def _check_model(run: Run) -> None:
    m = run.model
    heads = m.num_kv_heads or m.num_heads
    if m.head_size is None and m.d_model % m.num_heads:
        raise BadInput(
            "model.num_heads", got=m.num_heads, needed=f"a divisor of d_model={m.d_model}", fix=f"set it to one of {divisors(m.d_model)}"
        )
    if m.num_heads % heads:
        raise BadInput(
            "model.num_kv_heads", got=heads, needed=f"a divisor of num_heads={m.num_heads}", fix=f"set it to one of {divisors(m.num_heads)}"
        )
    if m.positions == "rotary" and (m.head_size or m.d_model // m.num_heads) % 2:
        raise BadInput(
            "model.head_size",
            got=m.head_size or m.d_model // m.num_heads,
            needed="an even size for rotary positions",
            fix="change head_size, or set model.positions to t5",
        )
    if m.moe_every and m.moe_layers is not None:
        raise BadInput(
            "model.moe_layers",
            got=f"moe_every={m.moe_every} as well",
            needed="one of the two",
            fix="remove moe_every or set moe_layers to null",
        )
    if m.moe_every > m.num_layers:
        raise BadInput(
            "model.moe_every", got=m.moe_every, needed=f"at most num_layers={m.num_layers}", fix="set it to 2, or to 0 for a dense model"
        )
    bad = [i for i in m.layers_with_experts() if not 0 <= i < m.num_layers]
    if bad or len(set(m.layers_with_experts())) < len(m.layers_with_experts()):
        raise BadInput(
            "model.moe_layers",
            got=list(m.layers_with_experts()),
            needed=f"different numbers from 0 to {m.num_layers - 1}",
            fix=f"remove {bad or 'the repeated ones'}",
        )
    tokenizer = 256 if run.data.tokenizer == "bytes" else run.data.vocab_size
    if run.vocab_size < tokenizer:
        raise BadInput(
            "model.vocab_size",
            got=run.vocab_size,
            needed=f"at least the tokenizer's {tokenizer}",
            fix="set model.vocab_size to null to follow the tokenizer",
        )


def _check_experts(run: Run) -> None:
    if not run.model.layers_with_experts():
        if run.degrees.ep not in ("auto", 1):
            raise BadInput(
                "degrees.ep", got=run.degrees.ep, needed="1 for a dense model", fix="set degrees.ep to 1, or model.moe_every to 2"
            )
        return
    e, ep, k = run.experts.num_experts, run.degrees.ep, run.router.num_choices
    if isinstance(ep, int) and ep > 0 and e % ep:
        fitting = divisors(math.gcd(e, run.degrees.dp)) if isinstance(run.degrees.dp, int) and run.degrees.dp > 0 else divisors(e)
        raise BadInput("experts.num_experts", got=e, needed=f"a multiple of degrees.ep={ep}", fix=f"set degrees.ep to one of {fitting}")
    if k > e:
        raise BadInput(
            "experts.num_experts",
            got=e,
            needed=f"at least the {k} choices of router.preset={run.router.preset}",
            fix=f"set it to {max(k, 8)}, or router.preset to switch",
        )
    if isinstance(run.router.group, int) and run.router.group < 1:
        raise BadInput(
            "router.group", got=run.router.group, needed="at least 1 sequence, or sequence, or rank", fix="set router.group to sequence"
        )
    if run.router.second != "preset" and k == 1:
        raise BadInput(
            "router.second",
            got=run.router.second,
            needed="a top-2 preset",
            fix="set router.preset to gshard or glam, or router.second to preset",
        )


def _check_precision(run: Run) -> None:
    p = run.precision
    if p.master == "bf16" and p.compute != "bf16":
        raise BadInput(
            "precision.master", got=f"bf16 with compute {p.compute}", needed="fp32 master weights", fix="set precision.master to fp32"
        )
    if p.compute == "fp16" and p.loss_scale == "none":
        raise BadInput(
            "precision.loss_scale",
            got="none with compute fp16",
            needed="a loss scale: gradients below 6e-8 vanish in fp16",
            fix="set precision.loss_scale to dynamic",
        )
    if p.compute != "fp16" and p.loss_scale != "none":
        raise BadInput(
            "precision.loss_scale",
            got=f"{p.loss_scale} with compute {p.compute}",
            needed=f"none: {p.compute} has the range of fp32",
            fix="set precision.loss_scale to none",
        )
    if isinstance(p.loss_scale, float) and p.loss_scale <= 0:
        raise BadInput("precision.loss_scale", got=p.loss_scale, needed="above 0", fix="set precision.loss_scale to dynamic")


def _check_data(run: Run) -> None:
    d = run.data
    if d.path is None:
        if d.source != "python_stdlib":
            raise BadInput("data.path", got="null", needed=f"a path for data.source={d.source}", fix="add --data.path FILE_OR_FOLDER")
        return
    path = Path(d.path).expanduser()
    if not path.exists():
        beside = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
        near = did_you_mean(path.name, beside)
        raise BadInput(
            "data.path",
            got=d.path,
            needed="a file or folder that exists",
            fix=f"did you mean {path.parent / near}?" if near else "check the spelling and the folder you are in",
        )
    empty = path.stat().st_size == 0 if path.is_file() else not any(p.is_file() and p.stat().st_size for p in path.rglob("*"))
    if empty:
        raise BadInput("data.path", got=f"{d.path}, which is empty", needed="text", fix="name a file or folder that holds text")


def _check_batch(run: Run) -> None:
    batch, dp, m = run.train.global_batch, run.degrees.dp, run.pipeline.microbatches
    if not isinstance(dp, int) or dp < 1:
        raise BadInput("degrees.dp", got=dp, needed="a whole number of at least 1", fix="set degrees.dp to auto")
    if batch % (dp * m):
        raise BadInput(
            "train.global_batch",
            got=batch,
            needed=f"a multiple of degrees.dp * pipeline.microbatches = {dp} * {m}",
            fix=f"set it to {max(1, round(batch / (dp * m))) * dp * m}",
        )
    group, held = run.router.group, batch // (dp * m)
    if run.model.layers_with_experts() and isinstance(group, int) and held % group:
        raise BadInput(
            "router.group",
            got=f"{group} sequences",
            needed=f"a divisor of the {held} sequences in one rank's micro-batch",
            fix=f"set router.group to one of {divisors(held)}",
        )
    if run.train.eval_sequences % dp:
        raise BadInput(
            "train.eval_sequences",
            got=run.train.eval_sequences,
            needed=f"a multiple of degrees.dp={dp}",
            fix=f"set it to {max(1, round(run.train.eval_sequences / dp)) * dp}",
        )


# --- files, overrides, origins ---------------------------------------------------------------------------------------


def recipe_names() -> list[str]:
    """The recipes that ship with the project."""
    return sorted(p.stem for p in RECIPES.glob("*.yaml"))


def recipe_path(name: str) -> Path:
    """A recipe by the name of a shipped one or by its path. Raises BadInput with the names there are."""
    for path in (RECIPES / f"{name}.yaml", Path(name).expanduser()):
        if path.is_file():
            return path
    near = did_you_mean(name, recipe_names())
    raise BadInput(
        "recipe",
        got=name,
        needed=f"a YAML file, or one of {', '.join(recipe_names())}",
        fix=f"did you mean {near}?" if near else "list them with: moe recipes",
    )


def read_recipe(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """A recipe merged with its parents, and each value's origin: {'model': {'d_ff': 512}}, {'model.d_ff': 'dense_tiny.yaml'}."""
    chain: list[tuple[Path, dict[str, Any]]] = []
    while True:
        if any(path.resolve() == seen.resolve() for seen, _ in chain):
            raise BadInput(
                "extends", got=f"{path.name}, which extends itself", needed="one parent, without a circle", fix="remove one `extends:`"
            )
        values = _read_yaml(path)
        parent = values.pop("extends", None)
        chain.append((path, values))
        if parent is None:
            break
        if not isinstance(parent, str):
            raise BadInput("extends", got=parent, needed="the name of one recipe", fix="write for example: extends: dense_tiny")
        beside = path.parent / f"{parent}.yaml"
        path = beside if beside.is_file() else recipe_path(parent)
    merged: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for source, values in reversed(chain):
        for section, fields in values.items():
            if not isinstance(fields, dict):
                _refuse_key((section,)) if section not in Run.model_fields else None
                raise BadInput(
                    f"{section} in {source.name}", got=fields, needed="a section: key: value pairs", fix=f"write {section}: {{key: value}}"
                )
            for key, value in fields.items():
                merged.setdefault(section, {})[key] = value
                origins[f"{section}.{key}"] = source.name
    return merged, origins


_NOT_YAML = (yaml.YAMLError, ValueError, RecursionError)  # the last two: dates such as 2024-13-45, and deep nesting


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader, which would keep the last of two equal keys and say nothing."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value]
        for at, (key, _) in enumerate(node.value):
            if key.value in keys[:at]:
                raise yaml.constructor.ConstructorError(None, None, f"{key.value} twice", key.start_mark)
        return super().construct_mapping(node, deep)


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"recipe {path}", got=error, needed="a readable text file", fix="check the file") from None
    except _NOT_YAML as error:
        where = getattr(error, "problem_mark", None)
        line = f", line {where.line + 1}" if where else ""
        problem = getattr(error, "problem", None) or f"not YAML ({error or 'nested too deeply'})"
        raise BadInput(f"recipe {path.name}{line}", got=problem, needed="plain YAML", fix="mend that line") from None
    if values is None:
        values = {}
    if not isinstance(values, dict):
        raise BadInput(
            f"recipe {path.name}", got=type(values).__name__, needed="sections, each with key: value pairs", fix="see: moe show switch_tiny"
        )
    return values


def load(recipe: str, overrides: dict[str, str] | None = None) -> tuple[Run, dict[str, str]]:
    """A recipe by name or path with dotted overrides (text, read as YAML): the Run and each value's origin. Raises BadInput."""
    values, origins = read_recipe(recipe_path(recipe))
    for dotted, text in (overrides or {}).items():
        if dotted not in known_keys():
            _refuse_key(tuple(dotted.split(".")))
        section, _, key = dotted.partition(".")
        values.setdefault(section, {})[key] = _read_value(text, _section(Run.model_fields[section]).model_fields[key].annotation)
        origins[dotted] = "command line"
    run = build(values)
    for section, fields in run.model_dump().items():
        for key in fields:
            origins.setdefault(f"{section}.{key}", "default")
    return run, origins


def _read_value(text: str, annotation: Any) -> Any:
    """A value from the command line, read as YAML; where text is wanted, as it stands (a folder may be called 2024 or no)."""
    try:
        value = yaml.safe_load(text)
    except _NOT_YAML:
        return text
    return text if value is not None and str in (annotation, *get_args(annotation)) else value


def build(values: dict[str, Any]) -> Run:
    """A Run from plain values, or BadInput for the first thing that is wrong in them."""
    try:
        return Run.model_validate(values)
    except ValidationError as error:
        errors = error.errors(include_url=False)
        first = next((e for e in errors if e["type"] == "extra_forbidden"), errors[0])
        more = len({".".join(map(str, e["loc"][:2])) for e in errors}) - 1
        raise _explain(dict(first), more) from None


def known_keys() -> list[str]:
    """Every dotted key of a recipe."""
    return [f"{section}.{key}" for section, field in Run.model_fields.items() for key in _section(field).model_fields]


def _section(field: Any) -> type[Section]:
    kind: type[Section] = field.annotation
    return kind


def _refuse_key(path: tuple[Any, ...]) -> None:
    dotted = ".".join(map(str, path))
    sections = list(Run.model_fields)
    if path[0] not in sections:
        near = did_you_mean(dotted, known_keys() if len(path) > 1 else sections)
        owners = [k for k in known_keys() if k.split(".")[1] == path[-1]]
        fix = f"did you mean {near}?" if near else f"did you mean {owners[0]}?" if owners else "see: moe show switch_tiny"
        raise BadInput(dotted, got="a section that does not exist", needed=f"one of {', '.join(sections)}", fix=fix)
    if len(path) == 1:
        raise BadInput(
            dotted,
            got="a section without a key",
            needed=f"{dotted}.KEY",
            fix=f"for example --{next(k for k in known_keys() if k.startswith(dotted + '.'))} VALUE",
        )
    keys = list(_section(Run.model_fields[path[0]]).model_fields)
    near = did_you_mean(str(path[1]), keys)
    elsewhere = [k for k in known_keys() if k.split(".")[1] == path[1]]
    fix = (
        f"did you mean {path[0]}.{near}?"
        if near
        else f"did you mean {elsewhere[0]}?"
        if elsewhere
        else "remove it, or see: moe show switch_tiny"
    )
    raise BadInput(dotted, got="a key that does not exist", needed=f"one of {', '.join(keys)}", fix=fix)


def _explain(error: dict[str, Any], more: int) -> BadInput:
    """pydantic's first complaint as one line in our form."""
    loc = tuple(p for p in error["loc"])
    if error["type"] == "extra_forbidden":
        try:
            _refuse_key(loc)
        except BadInput as refused:
            return refused
    dotted = ".".join(map(str, loc[:2]))
    field = _section(Run.model_fields[loc[0]]).model_fields.get(str(loc[1])) if len(loc) > 1 else None
    choices = _choices(field.annotation) if field else []
    needed = error["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
    fix = f"set {dotted} to a value like {field.default!r}" if field is not None else f"write {dotted}: {{key: value}}"
    if choices:
        near = did_you_mean(str(error["input"]), choices)
        numbers = " or a number" if field is not None and _takes_number(field.annotation) else ""
        needed = f"{', '.join(choices)}{numbers}" if len(choices) > 1 or numbers else f"{choices[0]} (the only choice this version has)"
        fix = f"did you mean {near}?" if near and near != str(error["input"]) else f"set {dotted} to {choices[0]}"
    if more > 0:
        fix += f" ({more} more wrong {'value' if more == 1 else 'values'} after this one)"
    return BadInput(dotted, got=_shown(error["input"]), needed=needed, fix=fix)


def _shown(value: Any) -> str:
    """A wrong value in a few words, whatever is nested in it."""
    short = reprlib.Repr()
    short.maxlevel, short.maxstring, short.maxother = 2, 80, 80
    return json.dumps(value) if value is None or isinstance(value, bool | int | float) else short.repr(value)


def _choices(annotation: Any) -> list[str]:
    if get_origin(annotation) is Literal:
        return [str(a) for a in get_args(annotation)]
    return [c for a in get_args(annotation) for c in _choices(a)]


def _takes_number(annotation: Any) -> bool:
    return any(a in (int, float) for a in get_args(annotation))


def resolved_yaml(run: Run, origins: dict[str, str]) -> str:
    """The whole recipe as YAML, each value with its origin as a comment; `load` reads it back."""
    lines = []
    for section, fields in run.model_dump(mode="json").items():
        lines.append(f"{section}:")
        width = max(len(key) + len(json.dumps(value)) for key, value in fields.items())
        for key, value in fields.items():
            text = f"{key}: {json.dumps(value)}"
            lines.append(f"  {text:<{width + 2}}  # {origins.get(f'{section}.{key}', 'default')}")
    return "\n".join(lines) + "\n"
