"""Files of an imported transformers model other than its tensors. They are copied from run to run, and exported again.

hf:A  ->  runs/base/huggingface/      config.json, generation_config.json, tokenizer files, chat template, dtypes.json
          runs/tuned/huggingface/     the same files, copied when runs/tuned began with runs/base (--init_from, moe convert --to)
hf:B  <-  runs/tuned                  all of them, with the trained tensors in the dtypes of A
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

KEPT = "huggingface"  # in the folder of a run


def kept(checkpoint: Path) -> Path:
    """Return the folder of these files, which may not exist, in the run of a checkpoint."""
    return checkpoint.parent.parent / KEPT


def pass_on(checkpoint: Path, out: Path) -> None:
    """Copy the files of a checkpoint's run, if it has any, to a run in `out` that begins with the checkpoint."""
    source, target = kept(checkpoint), out / KEPT
    if not source.is_dir() or (target.exists() and target.samefile(source)):
        return
    part = out / f".{KEPT}.partial-{os.getpid()}"
    shutil.copytree(source, part)
    shutil.rmtree(target, ignore_errors=True)  # a copy left by an earlier, interrupted start
    part.rename(target)
