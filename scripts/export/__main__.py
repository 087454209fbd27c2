"""Writes a trained model in a format that other tools open.

    python -m scripts.export run_dir=runs/mine out=exported/mine
    python -m scripts.export run_dir=runs/mine out=exported/mine push=me/my-model dry_run=true
    python -m scripts.export run_dir=runs/mine out=exported/adapter format=peft
    python -m scripts.export run_dir=runs/mine out=exported/merged.safetensors format=weights

`diffusers`: a folder with one file of model code, weights, the pipeline, the autoencoder
(include_autoencoder=false: only its name) and a model card; diffusers opens it with
trust_remote_code=True. `peft`: the run's adapter in PEFT's format. `weights`: a weights
file of fastlatent with the adapter merged. `push` uploads the folder with the login of
`huggingface-cli login`, or HF_TOKEN; dry_run=true prints which files it would upload, and where.
"""

from __future__ import annotations

import shutil
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from common.config.paths import refuse_no_weights
from common.config.schema import RuntimeConfig
from common.errors import UserError
from sampling.draw import ModelConfig
from scripts.commands import run_command

if TYPE_CHECKING:
    from sampling.load import TrainedModel

PLAIN_RUNTIME = asdict(RuntimeConfig())
"""Runtime keys of an exported model: every key has its default, so no technique is on."""
CARD_HEAD = """---
library_name: diffusers
tags: ["fastlatent", "latent-generative-model"]
---

"""


Format = StrEnum("Format", "diffusers peft weights")


@dataclass(frozen=True)
class ExportConfig(ModelConfig):
    """Keys of the command: the model to export, the format, and where to write it."""

    out: str | None = None
    format: Format = Format.diffusers
    include_autoencoder: bool = True
    push: str | None = None
    """Repository on the Hugging Face hub to upload to, as owner/name; null: no upload."""
    dry_run: bool = False

    def check(self) -> None:
        """Checks the keys. Raises UserError if some are missing or contradict each other."""
        self.refuse_no_model("export")
        if self.out is None:
            raise UserError("out is not set; say where to write: out=exported/<name>.")
        suffix = ".safetensors" if self.format is Format.weights else ""
        if not self.out.endswith(suffix):
            raise UserError(f"out={self.out} must end in {suffix} with format={self.format}.")
        if self.push is not None and (
            self.format is not Format.diffusers or self.push.count("/") != 1
        ):
            raise UserError(
                f"push={self.push} must be <owner>/<name>, and goes with format=diffusers."
            )
        if self.dry_run and self.push is None:
            raise UserError("dry_run=true is for push=<owner>/<name>; leave it out.")
        refuse_no_weights(self.key, self.path)


def export(cfg: ExportConfig) -> Path:
    """Exports a model as `cfg` says and returns the path. Raises UserError if the path exists
    already, or if the format cannot hold the model."""
    cfg.check()
    out = Path(str(cfg.out)).expanduser()
    temporary = out.with_name(f"{out.name}.tmp{out.suffix}")
    # If an earlier call, such as one with dry_run=true, has already written the folder, only upload
    # it.
    if cfg.push is None or not (out / "model_index.json").is_file():
        for path in (out, temporary):
            if path.exists():
                raise UserError(
                    f"out={cfg.out}: {path} is there already; choose another path, or delete it."
                )
        from common.files import make_folder, rename

        make_folder(out.parent)
        try:
            WRITERS[cfg.format](cfg, temporary)
            rename(temporary, out)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.unlink(missing_ok=True)
        print(out, flush=True)
    if cfg.push is not None:
        push(out, cfg.push, cfg.dry_run)
    return out


def load_trained(cfg: ExportConfig) -> TrainedModel:
    """Loads the trained model that `cfg` names (a run's or a weights file's) to the CPU, in
    fp32."""
    from sampling.load import load_run

    return load_run(
        cfg.find_model(), cfg.encoder, "cpu", cfg.key, PLAIN_RUNTIME, adapter=cfg.adapter
    )


def write_diffusers(cfg: ExportConfig, folder: Path) -> None:
    """Writes a folder that diffusers opens."""
    from sampling.load import find_run_folder
    from scripts.export.folder import can_be_included, write_folder
    from scripts.report.history import History
    from scripts.report.pages import render_card

    trained = load_trained(cfg)
    include = cfg.include_autoencoder and can_be_included(trained)
    if cfg.include_autoencoder and not include:
        print("the autoencoder is code of your own: it is named and not included", flush=True)

    # Write the model card: code that samples from the folder, and, if the weights lie in a run
    # folder, the report of the run.
    how = describe_sampling(cfg, trained, include)
    card = f"# {Path(str(cfg.out)).name}\n\n## How to sample\n\n{how}\n"
    run = find_run_folder(trained.file)
    if run and (run / "config.yaml").is_file():
        card = render_card(History(run), how).partition("\n---\n\n")[2]
    folder.mkdir()
    write_folder(folder, trained, CARD_HEAD + card, include)


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


def describe_sampling(cfg: ExportConfig, trained: TrainedModel, include: bool) -> str:
    """Returns Markdown with Python code that opens the exported folder and draws samples. If no
    class of diffusers decodes the latents correctly, the code draws latents only."""
    from scripts.export.folder import can_be_included, find_branches, name_autoencoder

    names = trained.spec.names[:2] or [0]
    prompts = ["a red apple", "a yellow pear"][: len(names)]
    given = {"class": names, "text": prompts, "class_and_text": f"{names}, prompt={prompts}"}
    call = f"pipe({given[trained.conditioning]}, guidance_scale=2.0, seed=0"
    last = f"{call}).images[0].save('sample.png')"
    options = ""
    note = ""
    text = trained.spec.text
    if (
        trained.conditioning != "class"
        and text
        and Path(text.encoder.get("path") or "").is_absolute()
    ):
        options = ", text_encoder_path=<the folder of the text encoder>"
    if not include and can_be_included(trained) and not find_branches(trained):
        options += ", vae=<the autoencoder, opened by diffusers>"
    elif not include:
        last = f'latents = {call}, output_type="latent").images'
        note = (
            "\n\nNo class of diffusers computes what the autoencoder "
            f"({name_autoencoder(trained)}) does, and one that opens its files gives wrong "
            "colours. `python -m scripts.sample` draws images with the run."
        )
    code = (
        "from diffusers import DiffusionPipeline\n\n# trust_remote_code runs Python files of this "
        "folder: no library has this model or its sampler. Read them first.\n"
        f'pipe = DiffusionPipeline.from_pretrained("{cfg.push or cfg.out}", '
        f"trust_remote_code=True{options})\n"
        f"{last}"
    )
    return f"```python\n{code}\n```{note}"


def push(folder: Path, repository: str, dry_run: bool) -> None:
    """Uploads the folder. huggingface_hub reads the login token itself; this code never sees the
    token."""
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    size = sum(file.stat().st_size for file in files) / 2**20
    if dry_run:
        names = "\n".join(f"  {file.relative_to(folder)}" for file in files)
        print(
            f"would upload to https://huggingface.co/{repository}, {size:.1f} MiB:\n{names}",
            flush=True,
        )
        return
    from huggingface_hub import HfApi

    try:
        api = HfApi()
        api.create_repo(repository, exist_ok=True)
        api.upload_folder(repo_id=repository, folder_path=folder)
    # Catch all errors, because the network, the hub or a missing login raise many kinds of them.
    except Exception as error:
        raise UserError(
            f"push={repository} failed ({type(error).__name__}); {folder} is complete. Log in "
            f"with `huggingface-cli login`, and upload it: `huggingface-cli upload {repository} "
            f"{folder}`."
        ) from error
    print(f"https://huggingface.co/{repository}, {size:.1f} MiB", flush=True)


if __name__ == "__main__":
    run_command(export, ExportConfig, __doc__)
