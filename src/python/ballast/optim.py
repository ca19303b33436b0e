"""Optimizers for PyTorch whose states live in host memory or on NVMe.

    optimizer = ballast.OffloadAdamW(model.parameters(), lr=1e-4, max_grad_norm=1.0)

They are `torch.optim.Optimizer`s: parameter groups, learning-rate schedulers, `state` and
`state_dict` work as with PyTorch's own. Parameters may be fp32, bf16 or fp16, on the CPU or on a
GPU. Parameters of 16 bits have an fp32 master that the optimizer keeps.
"""

# tools/dev/write_optimizer_classes.py has written this file; do not edit it.

from __future__ import annotations

import torch
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from ._optimizer import OffloadOptimizer
from ._options import Options

__all__: list[str] = ["OffloadAdagrad", "OffloadAdam", "OffloadAdamax", "OffloadAdamW",
                      "OffloadLion", "OffloadOptimizer", "OffloadSGD"]


class OffloadAdamW(OffloadOptimizer):
    """AdamW, as torch.optim.AdamW: Adam with decoupled weight decay.

    Args:
        params: parameters, named parameters or parameter groups, as for torch.optim; or a module.
        lr: learning rate.
        betas: decay per step of the first and of the second moment.
        eps: added to the root of the second moment.
        weight_decay: decoupled: share of a weight that a step of learning rate 1 subtracts.
    """

    _name = "adamw"

    def __init__(self, params: ParamsT | torch.nn.Module, lr: float | torch.Tensor = 0.001,
                 betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-08,
                 weight_decay: float = 0.01, **options: Unpack[Options]) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay},
                         **options)


class OffloadAdam(OffloadOptimizer):
    """Adam, as torch.optim.Adam: weight decay as part of the gradient (L2).

    Args:
        params: parameters, named parameters or parameter groups, as for torch.optim; or a module.
        lr: learning rate.
        betas: decay per step of the first and of the second moment.
        eps: added to the root of the second moment.
        weight_decay: added to the gradient, times the weight.
    """

    _name = "adam"

    def __init__(self, params: ParamsT | torch.nn.Module, lr: float | torch.Tensor = 0.001,
                 betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-08,
                 weight_decay: float = 0.0, **options: Unpack[Options]) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay},
                         **options)


class OffloadAdagrad(OffloadOptimizer):
    """Adagrad, as torch.optim.Adagrad: a sum of squares instead of moments.

    Args:
        params: parameters, named parameters or parameter groups, as for torch.optim; or a module.
        lr: learning rate.
        weight_decay: added to the gradient, times the weight.
        eps: added to the root of the sum of squares.
    """

    _name = "adagrad"

    def __init__(self, params: ParamsT | torch.nn.Module, lr: float | torch.Tensor = 0.01,
                 weight_decay: float = 0.0, eps: float = 1e-10, **options: Unpack[Options]) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "eps": eps},
                         **options)


class OffloadLion(OffloadOptimizer):
    """Lion: the sign of an interpolated moment; decoupled weight decay.

    Args:
        params: parameters, named parameters or parameter groups, as for torch.optim; or a module.
        lr: learning rate.
        betas: weight of the moment in the update, and its decay per step.
        weight_decay: decoupled: share of a weight that a step of learning rate 1 subtracts.
    """

    _name = "lion"

    def __init__(self, params: ParamsT | torch.nn.Module, lr: float | torch.Tensor = 0.0001,
                 betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0,
                 **options: Unpack[Options]) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay},
                         **options)


class OffloadSGD(OffloadOptimizer):
    """SGD, as torch.optim.SGD: momentum, optionally Nesterov's; weight decay as part of the
    gradient.

    Args:
        params: parameters, named parameters or parameter groups, as for torch.optim; or a module.
        lr: learning rate.
        momentum: decay per step of the moment; 0: no moment.
        weight_decay: added to the gradient, times the weight.
        nesterov: Nesterov's momentum, which needs a momentum above 0.
    """

    _name = "sgd"

    def __init__(self, params: ParamsT | torch.nn.Module, lr: float | torch.Tensor = 0.001,
                 momentum: float = 0.0, weight_decay: float = 0.0, nesterov: bool = False,
                 **options: Unpack[Options]) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay,
                                  "nesterov": nesterov},
                         **options)


class OffloadAdamax(OffloadOptimizer):
    """Adamax, as torch.optim.Adamax: Adam with the largest recent gradient as its second moment;
    weight decay as part of the gradient.

    Args:
        params: parameters, named parameters or parameter groups, as for torch.optim; or a module.
        lr: learning rate.
        betas: decay per step of the first moment and of the largest gradient.
        eps: added to the magnitude of each gradient.
        weight_decay: added to the gradient, times the weight.
    """

    _name = "adamax"

    def __init__(self, params: ParamsT | torch.nn.Module, lr: float | torch.Tensor = 0.002,
                 betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-08,
                 weight_decay: float = 0.0, **options: Unpack[Options]) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay},
                         **options)
