"""Parameter groups of the optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from accel.composite_optimizer import Groups
from common.config.build import resolve_target
from models.adapters import find_trained_parameters
from models.layers import Ranges
from training.heads import ModelWithHeads


def make_parameter_groups(network: ModelWithHeads, optim: Mapping[str, Any]) -> Groups:
    """Returns the trained parameters in groups for the optimizer that `optim`, its configuration,
    describes: first those with weight decay, then those that `network.no_weight_decay()` names.

    If the optimizer's class has the attribute `takes_matrices`, each group is divided further, so
    that its parameters have the same shape and the same matrices. The matrices become the group's
    option `matrices` (`Layer.list_matrices`); groups without matrices are not divided.
    """
    kind = resolve_target(optim.get("_target_", ""), "optim")
    matrices: dict[Tensor, Ranges] = {}
    for layer in network.blocks.modules() if hasattr(kind, "takes_matrices") else ():
        if hasattr(layer, "list_matrices"):
            matrices |= layer.list_matrices()  # pyright: ignore[reportCallIssue]

    exempt = network.no_weight_decay()
    groups: dict[Any, dict[str, Any]] = {}
    trained = find_trained_parameters(network)
    for name in sorted(trained, key=exempt.__contains__):  # a stable sort
        parameter = trained[name]
        ranges = matrices.get(parameter, ())
        decay = 0.0 if name in exempt else optim.get("weight_decay", 0.0)
        key = (name in exempt, ranges, parameter.shape if ranges else ())
        options = {"params": [], "weight_decay": decay, "matrices": ranges}
        groups.setdefault(key, options)["params"].append(parameter)
    return list(groups.values())
