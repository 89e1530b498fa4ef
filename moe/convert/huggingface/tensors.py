"""Reads tensors from a model's safetensors files by their keys, and writes such files.

    Source(folder)             opens the *.safetensors files of a folder; reads only their headers
    Source.check(shapes)       checks that each parameter has a tensor of the right shape, and that no tensor is left over
    Source.tensor(name)        reads one parameter, which must be finite; of a stack of experts, only one expert's part
    write(folder, forms, read) writes model.safetensors, or numbered files with their index

Only one tensor is in memory at a time (parallel/store/stored.py reads the same format).
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe.convert.huggingface.blocks import Plain, Stored, decoded
from moe.convert.huggingface.families import EXPERTS, NOT_READ, Family, Row
from parallel.errors import BadInput, counted
from parallel.mesh.layout import Box
from parallel.store.files import read_text
from parallel.store.stored import STORED, TensorFile, finite

FILE_BYTES = 2**29  # largest size of a written file that has several tensors
Shape = tuple[int, ...]
Form = tuple[torch.dtype, Shape]  # dtype and shape of a tensor in a file
_OTHERS = ("*.bin", "*.pt", "*.pth", "*.gguf")


@dataclass(frozen=True)
class Location:
    """Location of a parameter in the files. `row`: the Row for this parameter in families.py; it says whether the parameter is transposed
    in the file, and whether it is one half of a tensor. `key`: key of the file's tensor that contains the parameter. `expert`: index of the
    parameter's expert; None: it belongs to no single expert."""

    row: Row
    key: str
    expert: int | None = None

    def whole(self, shape: Shape, experts: int) -> Shape:
        """Return the shape of the file's tensor that contains a parameter of this shape. `experts`: number of experts in this tensor, if it
        is stacked."""
        there = list(shape[::-1] if self.row.turned else shape)
        if self.row.half is not None:
            there[-1 if self.row.mixed else 0] *= 2
        return (experts, *there) if self.row.stacked else tuple(there)

    def box(self, shape: Shape) -> Box:
        """Return the region of the file's tensor that contains a parameter of this shape. If the columns of two
        parameters alternate (gate and up projection), the region contains both."""
        there = shape[::-1] if self.row.turned else shape
        if not self.row.stacked:
            return tuple(slice(0, n) for n in there)
        assert self.expert is not None
        mine = slice(self.expert, self.expert + 1)
        if self.row.mixed:
            return (mine, *(slice(0, n) for n in there[:-1]), slice(0, 2 * there[-1]))
        first = (self.row.half or 0) * there[0]
        return (mine, slice(first, first + there[0]), *(slice(0, n) for n in there[1:]))

    def of_box(self, read: Tensor) -> Tensor:
        """Return the parameter as a view of `read`, which is the region `box` of the file's tensor."""
        read = read[0] if self.row.stacked else read
        read = read[..., self.row.half :: 2] if self.row.mixed else read
        return read.t() if self.row.turned else read


def locations(name: str, family: Family, *, stacked: bool = True) -> Iterator[Location]:
    """Yield the possible locations of a parameter in the transformers files of a model family. The first one is used for writing. `name`:
    the parameter's name in this project. `stacked`: also yield the location in a tensor that stacks all experts."""
    kinds = [] if family.experts is None else [family.experts, "shared", *["stacked"] * stacked]
    for row in (*family.rows, *(row for kind in kinds for row in EXPERTS[kind])):
        found = _pattern(row.ours).fullmatch(name)
        if found is not None:
            expert = found.groupdict().get("e")
            yield Location(row, row.theirs.format(**found.groupdict()), None if expert is None else int(expert))


@cache
def _pattern(ours: str) -> re.Pattern[str]:
    return re.compile(re.escape(ours).replace(r"\{l\}", r"(?P<l>\d+)").replace(r"\{e\}", r"(?P<e>\d+)"))


@dataclass
class Source:
    """The safetensors files of a folder. Raises BadInput if there are none, or if one is damaged. `quantization`: quantization_config of
    the config.json. `files`: key of a tensor -> the tensor, decoded to bf16 if it is quantized. `found`, `shapes`: name of a parameter ->
    its location and its shape, after a call of `check`."""

    folder: Path
    quantization: Any = None
    files: dict[str, Stored] = field(default_factory=dict)
    found: dict[str, Location] = field(default_factory=dict)
    shapes: Mapping[str, Shape] = field(default_factory=dict)

    def __post_init__(self) -> None:
        paths = _of_the_model(self.folder)
        if not paths:
            others = sorted({path.suffix for pattern in _OTHERS for path in self.folder.glob(pattern)})
            fix = "save it again with transformers: model.save_pretrained(PATH)"
            raise BadInput("hf:PATH", got=f"{self.folder} with {', '.join(others) or 'no tensors'}", needed="*.safetensors", fix=fix)
        plain: dict[str, Plain] = {}
        for path in paths:
            try:
                file = TensorFile(path)
            except OSError as error:
                fix = "check the file and its permissions"
                raise BadInput(str(path), got=error.strerror or error, needed="a file that can be read", fix=fix) from None
            except (ValueError, KeyError, TypeError) as error:
                fix = "copy it again"
                raise BadInput(str(path), got=f"a damaged file ({error})", needed="a whole safetensors file", fix=fix) from None
            for key in file.places:
                if key in plain:
                    got = f"{key} in {plain[key].file.path.name} and {path.name}"
                    raise BadInput(
                        str(self.folder), got=got, needed="each tensor once", fix="keep only the files of one model in the folder"
                    )
                plain[key] = Plain(file, key)
        self.files = decoded(plain, self.quantization)

    def check(
        self, family: Family, shapes: Mapping[str, Shape], *, tied: bool, further: tuple[str, ...] = (), without_further: bool = False
    ) -> None:
        """Find each parameter's location. Raises BadInput for a tensor that is missing, left over, or of another shape. `tied`:
        the head is the embedding. `further`: prefixes of the keys of layers for multi-token prediction. `without_further`: leave these
        layers out instead of refusing them."""
        self.shapes, experts = shapes, _experts(shapes)
        for name, shape in shapes.items():
            candidates = list(locations(name, family))
            location = next((location for location in candidates if location.key in self.files), None)
            if location is None:
                needed = " or ".join(dict.fromkeys(location.key for location in candidates)) or "a family of models that has this parameter"
                raise BadInput(str(self.folder), got=f"no tensor for {name}", needed=needed, fix="take all files of the model")
            stored_shape = self.files[location.key].shape
            needs = location.whole(shape, experts.get(name.partition(".experts.")[0], 0))
            if stored_shape != needs:
                fix = "take the config.json that belongs to the files"
                raise BadInput(f"tensor {location.key}", got=f"shape {list(stored_shape)}", needed=f"{list(needs)}", fix=fix)
            self.found[name] = location
        used = {location.key for location in self.found.values()} | ({"lm_head.weight"} if tied else set())
        left = [key for key in self.files if key not in used and not key.endswith(NOT_READ)]
        mtp = [key for key in left if key.startswith(further)]
        if mtp and not without_further:
            got = f"{counted(len(mtp), 'tensor')} of layers for multi-token prediction"
            needed = "only the main model: such layers cannot be converted"
            raise BadInput(f"tensor {mtp[0]}", got=got, needed=needed, fix="leave them out: moe convert hf:PATH runs/NAME --without_mtp")
        left = [key for key in left if not key.startswith(further)]
        if left:
            more = f" and {len(left) - 1} more" if len(left) > 1 else ""
            needed, fix = "only parameters of the recipe's model", "this model is not supported: see docs/use/huggingface.md"
            raise BadInput(f"tensor {left[0]}{more}", got="a tensor that nothing reads", needed=needed, fix=fix)
        if tied and "lm_head.weight" in self.files and not self._read("lm_head.weight").equal(self._read(family.embedding)):
            got = f"another matrix than {family.embedding} with tie_word_embeddings"
            fix = "set tie_word_embeddings to false in config.json"
            raise BadInput("tensor lm_head.weight", got=got, needed="the embedding's values, because the two are tied", fix=fix)

    def dtypes(self) -> dict[str, Any]:
        """Return {"most": dtype of most parameters, "others": name -> dtype of the other parameters}. Call `check` first."""
        found = {name: str(self.files[location.key].dtype).removeprefix("torch.") for name, location in self.found.items()}
        most = Counter(found.values()).most_common(1)[0][0]
        return {"most": most, "others": {name: dtype for name, dtype in found.items() if dtype != most}}

    def tensor(self, name: str) -> Tensor:
        """Return a parameter in the dtype of its file. Raises BadInput for numbers that are not finite. Call `check` first."""
        location, shape = self.found[name], self.shapes[name]
        read = self.files[location.key].read(location.box(shape))
        if not read.is_floating_point() or not finite(read):
            got = "values that are not finite" if read.is_floating_point() else f"values of {str(read.dtype).removeprefix('torch.')}"
            fix = "copy the file again, or save the model again"
            raise BadInput(f"tensor {location.key}", got=got, needed="finite floating-point numbers", fix=fix)
        return location.of_box(read).contiguous()

    def _read(self, key: str) -> Tensor:
        return self.files[key].read(tuple(slice(0, n) for n in self.files[key].shape))


def _of_the_model(folder: Path) -> list[Path]:
    """Return the safetensors files that model.safetensors.index.json names. Without a valid index: all files except Mistral's second
    copy (consolidated*.safetensors)."""
    paths = sorted(folder.glob("*.safetensors"))
    try:
        named = set(json.loads(read_text(folder / "model.safetensors.index.json"))["weight_map"].values())
    except (OSError, ValueError, RecursionError, LookupError, TypeError, AttributeError):
        named = set()
    if "model.safetensors" not in named and (folder / "model.safetensors").is_file():
        named = set()  # model.safetensors has all tensors, so the index belongs to another copy of the model
    chosen = [path for path in paths if path.name in named]
    return chosen or [path for path in paths if not path.name.startswith("consolidated")] or paths


def _experts(shapes: Mapping[str, Shape]) -> dict[str, int]:
    """Return name of a layer with experts -> number of its experts. `shapes`: name -> shape of all parameters."""
    found: dict[str, int] = {}
    for name in shapes:
        layer, inside, rest = name.partition(".experts.")
        if inside:
            found[layer] = max(found.get(layer, 0), int(rest.split(".")[0]) + 1)
    return found


def by_key(names: Iterable[str], family: Family) -> dict[str, list[str]]:
    """Return key of a tensor in written files -> names of the parameters that it contains."""
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(_written(name, family).key, []).append(name)
    return found


def written(names: Sequence[str], family: Family, shapes: Mapping[str, Shape], read: Callable[[str], Tensor]) -> Tensor:
    """Return the tensor to write that contains the parameters `names`. `shapes`: name -> shape of all parameters. `read`: returns a
    parameter by its name."""
    out = None
    for name in names:
        tensor, location = read(name), _written(name, family)
        if not location.row.stacked:
            return tensor.t().contiguous() if location.row.turned else tensor.contiguous()
        if out is None:
            out = tensor.new_empty(shape_of(names, family, shapes))
        location.of_box(out[location.box(shapes[name])]).copy_(tensor)
    assert out is not None
    return out


def shape_of(names: Sequence[str], family: Family, shapes: Mapping[str, Shape]) -> Shape:
    """Return the shape of the written tensor that contains the parameters `names`: one parameter, or all experts' in a stack."""
    location, shape = _written(names[0], family), shapes[names[0]]
    return location.whole(shape, _experts(shapes)[names[0].partition(".experts.")[0]] if location.row.stacked else 0)


def _written(name: str, family: Family) -> Location:
    return next(locations(name, family, stacked=False))


def write(folder: Path, forms: Mapping[str, Form], read: Callable[[str], Tensor]) -> None:
    """Write tensors into files of at most FILE_BYTES each; a larger tensor gets its own file. `forms`: key -> dtype and shape. `read`:
    returns a tensor by its key."""
    sizes = {key: dtype.itemsize * math.prod(shape) for key, (dtype, shape) in forms.items()}
    counts, keys = _tensors_of_files(list(sizes.values())), iter(forms)
    index: dict[str, str] = {}
    for number, count in enumerate(counts, 1):
        name = f"model-{number:05d}-of-{len(counts):05d}.safetensors" if len(counts) > 1 else "model.safetensors"
        held = {key: forms[key] for key in islice(keys, count)}
        write_file(folder / name, held, read)
        index |= dict.fromkeys(held, name)
    if len(counts) > 1:
        about = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": index}
        (folder / "model.safetensors.index.json").write_text(json.dumps(about, indent=2) + "\n")


def write_file(path: Path, forms: Mapping[str, Form], read: Callable[[str], Tensor]) -> None:
    """Write the same bytes as safetensors' save_file, but with only one tensor in memory at a time. `forms`: key -> dtype and shape.
    `read`: returns a tensor by its key."""
    names = {dtype: name for name, dtype in STORED.items()}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for key in sorted(forms, key=lambda key: (-forms[key][0].itemsize, names[forms[key][0]], key)):
        dtype, shape = forms[key]
        begin, end = end, end + dtype.itemsize * math.prod(shape)
        header[key] = {"dtype": names[dtype], "shape": shape, "data_offsets": (begin, end)}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for key in list(header)[1:]:
            file.write(_bytes_of(read(key), forms[key]))


def _bytes_of(tensor: Tensor, form: Form) -> memoryview:
    assert (tensor.dtype, tuple(tensor.shape)) == form
    return memoryview(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def _tensors_of_files(sizes: Sequence[int]) -> list[int]:
    """Distribute tensors over files of at most FILE_BYTES, in order. sizes: bytes of each tensor. Return the number of tensors in each
    file."""
    counts, held = [0], 0
    for size in sizes:
        if counts[-1] and held + size > FILE_BYTES:
            counts.append(0)
            held = 0
        counts[-1] += 1
        held += size
    return counts
