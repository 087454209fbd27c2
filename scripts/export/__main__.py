"""Writes a trained model in a format that other tools open.

    python -m scripts.export run_dir=runs/mine out=exported/mine
    python -m scripts.export run_dir=runs/mine out=exported/adapter format=peft
    python -m scripts.export run_dir=runs/mine out=exported/merged.safetensors format=weights

`diffusers`: a folder with one file of model code, weights, the pipeline, the autoencoder
(include_autoencoder=false: only its name) and a model card; diffusers opens it with
trust_remote_code=True, as the printed lines of Python do, and `hf upload me/my-model exported/mine`
uploads it. `peft`: the run's adapter in PEFT's format. `weights`: a weights file of fastlatent with
the adapter merged.
"""

from __future__ import annotations

import shutil
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from markupsafe import Markup

from common.config.paths import refuse_no_weights
from common.config.schema import RuntimeConfig
from common.errors import UserError
from sampling.draw import ModelConfig
from scripts.commands import run_command

if TYPE_CHECKING:
    from sampling.load import TrainedModel

Format = StrEnum("Format", "diffusers peft weights")


@dataclass(frozen=True)
class ExportConfig(ModelConfig):
    """Keys of the command: the model to export, the format, and where to write it."""

    out: str | None = None
    """Folder to write; for format=weights a file that ends in .safetensors."""
    format: Format = Format.diffusers
    """What to write."""
    include_autoencoder: bool = True
    """For diffusers: put the files of the autoencoder into the folder, not only its name."""

    def check(self) -> None:
        """Checks the keys. Raises UserError if some are missing or contradict each other."""
        self.refuse_no_model("export")
        if self.out is None:
            raise UserError("out is not set; say where to write: out=exported/<name>.")
        suffix = ".safetensors" if self.format is Format.weights else ""
        if not self.out.endswith(suffix):
            raise UserError(f"out={self.out} must end in {suffix} with format={self.format}.")
        refuse_no_weights(self.key, self.path)


def export(cfg: ExportConfig) -> Path:
    """Exports a model as `cfg` says and returns the path. Raises UserError if the path exists
    already, or if the format cannot hold the model."""
    cfg.check()
    out = Path(str(cfg.out)).expanduser()
    temporary = out.with_name(f"{out.name}.tmp{out.suffix}")
    for path in (out, temporary):
        if path.exists():
            raise UserError(
                f"out={cfg.out}: {path} is there already; choose another path, or delete it."
            )
    from common.files import make_folder, rename

    make_folder(out.parent)
    try:
        code = WRITERS[cfg.format](cfg, temporary)
        rename(temporary, out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.unlink(missing_ok=True)
    print(f"{out}\n\n{code}" if code else out, flush=True)
    return out


def load_trained(cfg: ExportConfig) -> TrainedModel:
    """Loads the trained model that `cfg` names (a run's or a weights file's) to the CPU, in
    fp32."""
    from sampling.load import load_run

    return load_run(
        cfg.find_model(),
        cfg.encoder,
        "cpu",
        cfg.key,
        asdict(RuntimeConfig()),  # every key has its default, so no technique is on
        adapter=cfg.adapter,
    )


def write_diffusers(cfg: ExportConfig, folder: Path) -> str:
    """Writes a folder that diffusers opens. Returns Python code that opens it and draws samples."""
    from sampling.load import find_run_folder
    from scripts.export.folder import can_be_included, find_branches, write_folder
    from scripts.report.history import History, name_autoencoder
    from scripts.report.pages import fill_template, render_card

    trained = load_trained(cfg)
    known = can_be_included(trained)
    include = cfg.include_autoencoder and known
    if cfg.include_autoencoder and not known:
        print("the autoencoder is code of your own: it is named and not included", flush=True)
    code = fill_template(
        "snippet.py.jinja",
        Markup,
        out=cfg.out,
        trained=trained,
        include=include,
        stock=known and not find_branches(trained),
        autoencoder=name_autoencoder(trained.spec.encoder),
    )

    # If the weights lie in a run folder, the model card reports the run.
    run = find_run_folder(trained.file)
    history = History(run) if run and (run / "config.yaml").is_file() else None
    folder.mkdir()
    write_folder(folder, trained, render_card(history, code, Path(str(cfg.out)).name), include)
    return code


def write_adapter(cfg: ExportConfig, folder: Path) -> None:
    """Writes the adapter in PEFT's format."""
    from training.checkpoint.load import find_weights_file, read_newest
    from training.weights.adapter_file import write_peft

    path = cfg.find_model()
    read_newest(path, lambda: write_peft(find_weights_file(path, cfg.key), folder))


def write_weights(cfg: ExportConfig, file: Path) -> None:
    """Writes a weights file of fastlatent, with the adapter merged."""
    from training.checkpoint.files import make_header, write_tensors

    trained = load_trained(cfg)
    description = trained.opened.description
    content = {
        "model": description.model,
        "spec": description.spec.as_dict(),
        "step": description.step,
    }
    write_tensors(file, trained.model.state_dict(), make_header(content, "ema"))


WRITERS = {
    Format.diffusers: write_diffusers,
    Format.peft: write_adapter,
    Format.weights: write_weights,
}


if __name__ == "__main__":
    run_command(export, ExportConfig, __doc__)
