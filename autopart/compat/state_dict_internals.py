"""Private APIs of torch for state dicts whose keys are parameter names."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch


@functools.cache
def full_state_dicts_through(put_together: Callable[[Any], Any], check_loaded: Callable[[Any], None]) -> None:
    """Install two functions that run whenever torch gathers or loads a full state dict.

    Args:
        put_together: called with a state dict that torch is about to gather for
            `StateDictOptions(full_state_dict=True)`. Torch gathers the returned state dict instead.
        check_loaded: called with each local state dict that `broadcast_from_rank0=True` has filled.
    """
    from torch.distributed.checkpoint import state_dict as state_dicts

    gather, broadcast = state_dicts._gather_state_dict, state_dicts._broadcast_state_dict

    @functools.wraps(gather)
    def gathered(state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        return gather(put_together(state_dict), *args, **kwargs)

    @functools.wraps(broadcast)
    def filled(full: Any, local: Any, *args: Any, **kwargs: Any) -> None:
        broadcast(full, local, *args, **kwargs)
        check_loaded(local)

    state_dicts._gather_state_dict = gathered
    state_dicts._broadcast_state_dict = filled  # type: ignore[assignment]  # its arguments have other names


@functools.cache
def optimizer_state_dicts_through(save: Callable[..., Any], load: Callable[..., Any]) -> None:
    """Install two functions that run when torch gets or sets optimizer state by parameter names.

    Args:
        save: called with (call, names, optimizers) in place of `call()`, torch's function that returns the state dict.
            `names` is {parameter of the model: its names}.
        load: called with (call, names, optimizer, state dict) in place of `call()`, torch's function that selects the
            state of one optimizer from a state dict.
    """
    from torch.distributed.checkpoint import state_dict as state_dicts

    get, split = state_dicts._get_optim_state_dict, state_dicts._split_optim_state_dict
    unflatten = state_dicts._unflatten_optim_state_dict

    def names_of(info: Any) -> dict[torch.Tensor, Any]:
        return {key: value for key, value in info.fqn_param_mapping.items() if isinstance(key, torch.Tensor)}

    @functools.wraps(get)
    def saved(model: Any, optimizers: Any, info: Any) -> Any:
        return save(functools.partial(get, model, optimizers, info), names_of(info), optimizers)

    @functools.wraps(split)
    def selected(model: Any, optimizer: Any, state_dict: Any, info: Any) -> Any:
        call = functools.partial(split, model, optimizer, state_dict, info)
        return load(call, names_of(info), optimizer, state_dict)

    @functools.wraps(unflatten)
    def unflattened(optimizer: Any, state_dict: Any, info: Any) -> Any:
        call = functools.partial(unflatten, optimizer, state_dict, info)
        return load(call, names_of(info), optimizer, state_dict)

    state_dicts._get_optim_state_dict = saved
    state_dicts._split_optim_state_dict = selected  # type: ignore[assignment]  # its arguments have other names
    state_dicts._unflatten_optim_state_dict = unflattened  # type: ignore[assignment]
