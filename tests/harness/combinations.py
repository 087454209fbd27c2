"""The choices of conf/ that tests combine with each other."""

from common.config.compose import CONF_FOLDER

DATA = {
    "digits": [],
    "synthetic": ["data.height=4", "data.width=8", "data.count=20", "data.num_classes=3"],
    "resident": ["data.path=latents"],
    "webdataset": ["data.path=latents", "data.streams=4", "data.num_workers=0"],
}
"""Data set -> overrides that make it small; `latents` is a folder in the working directory."""


def list_choices(group):
    """Names of the files of a group, such as `runtime`."""
    return sorted(file.stem for file in (CONF_FOLDER / group).glob("*.yaml"))


def choose_model(family):
    """Overrides that choose a model of two blocks; attention in the second makes it a hybrid."""
    return [f"model={family}_s", *(["model.attention_every=2"] if family == "hybrid" else [])]


FAMILIES = [name.removesuffix("_s") for name in list_choices("model") if name.endswith("_s")]
