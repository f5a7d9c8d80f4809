"""Kinds of objects that the walk meets and need no reading, each with its reason."""

import datetime
import decimal
import fractions
import functools
import inspect
import logging
import pathlib
import re
import threading
import types
import typing
import uuid

import numpy as np
import torch


# Nothing can change them: they are what they are printed as.
IMMUTABLE = (
    range, slice, re.Pattern, pathlib.PurePath, decimal.Decimal, fractions.Fraction, uuid.UUID,
    datetime.date, datetime.time, datetime.timedelta, datetime.tzinfo, inspect.Signature, types.GenericAlias,
    types.UnionType, types.EllipsisType, types.NotImplementedType, types.MemberDescriptorType,
    types.GetSetDescriptorType, types.CodeType, typing.TypeVar, np.dtype, torch.finfo, torch.iinfo,
    torch.memory_format,
)  # fmt: skip
# No number comes of them: they order threads, write a log, or take a hook away. torch's generators are noted when they draw.
IRRELEVANT = (
    type(threading.Lock()), type(threading.RLock()), threading.Thread, threading.Event, threading.Condition,
    threading.Semaphore, logging.Handler, logging.Filter, torch.utils.hooks.RemovableHandle, torch.Generator,
)  # fmt: skip
# Large objects of libraries beside the models, of which code of the user's reads a few attributes: these are read, by name, and all
# where it calls a method.
ASKED_BY_NAME = (
    "diffusers.pipelines", "diffusers.modular_pipelines", "diffusers.schedulers", "diffusers.image_processor",
    "diffusers.video_processor", "transformers.tokenization", "transformers.processing", "transformers.image_processing",
    "transformers.feature_extraction", "accelerate", "tqdm", "PIL", "tokenizers",
)  # fmt: skip


@functools.lru_cache(maxsize=16384)
def is_asked_by_name(cls: type) -> bool:
    return any(base.__module__.startswith(ASKED_BY_NAME) for base in cls.__mro__)


@functools.lru_cache(maxsize=16384)
def slots_of(cls: type) -> tuple[str, ...]:
    """Names of attributes that instances have without a dict."""
    found = [name for base in cls.__mro__ for name, value in vars(base).items() if _is_slot(value)]
    return tuple(sorted(dict.fromkeys(found)))


def _is_slot(value) -> bool:
    """A `__slots__` entry; members of types that are written in C are read by what they are."""
    return isinstance(value, types.MemberDescriptorType) and bool(value.__objclass__.__flags__ & (1 << 9))
