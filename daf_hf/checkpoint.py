"""What a training has learnt, beside its checkpoints: budget, importances, plan.

A save site's key holds code objects, which another process does not have; its place
(:mod:`daf_hf.places`) is the same there. So the first forward pass after a resumption is preceded
by one over a few tokens, in which the sites are seen and get back what was known of them. Nothing
is measured again.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import logging
import os
from collections.abc import Callable
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .batches import Inputs
from .calibration import Calibration, CalibrationError, NothingToMeasureError
from .codecs import Codec
from .kernels.format import Codebook, Granularity, Statistics
from .places import Place, place_of
from .session import Session
from .sites import Batch, Live, Probed, SaveSite
from .user_objects import text_of

logger = logging.getLogger("daf_hf")

FILE = "daf_state.pt"
"""Name of the file in a checkpoint's folder."""

_FIELDS = (
    *("dtype", "consumers", "probed", "importance", "error_at_zero", "candidates", "two_valued"),
    *("keep", "narrow", "normalised", "derived", "feeds", "doubted", "live", "alive", "watched"),
    "known",
)
_SESSION = ("_calibration_failed", "_calibration_needs")
_ADVICE = ("warned_of",)
_SCHEDULE = ("calibrated_at", "for_change", "last_seconds")
_PLACEMENT = ("calibrated", "frugal")
_PLANNER = ("_corrections", "_rounds", "token_seconds")
_OPTIONS = (
    *("bits", "importance", "codec", "include", "exclude", "skip_padding", "derive"),
    "checkpoint_inputs",
)
"""What was measured holds under these options alone."""

OTHER_MODEL = "with another model (other parameters, or others of them are trained)"

_PARTS = [
    ["place"],
    *map(list, (_FIELDS, _SESSION, _ADVICE, _SCHEDULE, _PLACEMENT, _PLANNER, _OPTIONS)),
]

_CLASSES = (Batch, Codebook, Granularity, Live, Probed, Statistics)


def save(session: Session, folder: str | os.PathLike[str]) -> None:
    """Write what a session has learnt into a folder; all of it, or nothing.

    Raises:
        OSError: when it cannot be written.
    """
    session.learn()
    path = Path(folder) / FILE
    unfinished = path.with_suffix(".tmp")
    try:
        _write(_state(session), unfinished)
        unfinished.replace(path)
    except (OSError, RuntimeError) as error:  # torch's word for a full disk
        unfinished.unlink(missing_ok=True)
        raise OSError(f"cannot write {path}: {error}") from error


def restore(session: Session, folder: str | os.PathLike[str]) -> bool:
    """Let a session go on with what :func:`save` wrote.

    The budget is taken up too, unless another one is configured now. What was measured under other
    options, with another model or on another kind of device is left alone, and so is the budget of
    another model.

    Returns:
        False when there is no such file, it cannot be read, or it does not hold here (a warning
        says why); training then starts by measuring.
    """
    path = Path(folder) / FILE
    with suppress(OSError):
        path.with_suffix(".tmp").unlink(missing_ok=True)  # of a run that was killed as it wrote
    if not path.is_file():
        logger.warning("daf_hf: %s is missing: all is measured anew", path)
        return False
    try:
        state = _read(path)
    except Exception as error:  # a file that is broken anywhere may raise anything
        reason = f"{type(error).__name__}: {error}"
        logger.warning("daf_hf: %s cannot be read (%s): all is measured again", path, reason)
        return False
    other = _what_differs(session, state)
    if other != OTHER_MODEL:
        session.budget.restore(state["budget"])
    if other:
        logger.warning("daf_hf: %s was measured %s: all is measured again", path, other)
        return False
    session.recall = functools.partial(_recall, session, state)
    return True


def _write(state: dict[str, Any], path: Path) -> None:
    """Write a state with its digest: not every flipped bit is noticed by what reads it."""
    written = BytesIO()
    torch.save(state, written)
    content = bytearray(written.getbuffer())
    digest = hashlib.sha256(content).hexdigest()
    torch.save({"digest": digest, "state": torch.frombuffer(content, dtype=torch.uint8)}, path)


def _read(path: Path) -> dict[str, Any]:
    """What :func:`save` wrote.

    Raises:
        Exception: it is damaged, or another version's.
    """
    written = torch.load(path, map_location="cpu", weights_only=True)
    if "state" not in written:
        raise ValueError("it is another version's")
    state = written["state"].numpy().tobytes()
    if hashlib.sha256(state).hexdigest() != written["digest"]:
        raise ValueError("it is damaged: its digest is another")
    with torch.serialization.safe_globals(list(_CLASSES)):
        found = torch.load(BytesIO(state), map_location="cpu", weights_only=True)
    if found["parts"] != _PARTS:
        raise ValueError("it is another version's")
    return found


def _what_differs(session: Session, state: dict[str, Any]) -> str:
    """Why what was measured does not hold in a session; empty when it does."""
    if state["model"] != _fingerprint(session.compressor.model):
        return OTHER_MODEL
    here = session.compressor.device.type
    if state["device"] != here:
        return f"on another device ({state['device']}, and not {here})"
    options = _options(session)
    changed = [name for name in _OPTIONS if state["options"][name] != options[name]]
    return f"under other options ({', '.join(changed)})" if changed else ""


def _fingerprint(model: nn.Module) -> str:
    """Equal for models that save the same: by names, shapes, dtypes, and what is trained."""
    described = [
        (name, tuple(parameter.shape), str(parameter.dtype), parameter.requires_grad)
        for name, parameter in model.named_parameters()
    ]
    return hashlib.sha256(repr(described).encode()).hexdigest()


def _state(session: Session) -> dict[str, Any]:
    compressor = session.compressor
    places = {site: place_of(key) for key, site in compressor.tracker.sites.items()}
    return {
        "parts": _PARTS,
        "options": _options(session),
        "model": _fingerprint(compressor.model),
        "device": compressor.device.type,
        "budget": session.budget.state(),
        "session": {name: getattr(session, name) for name in _SESSION},
        "advice": {name: getattr(session.advice, name) for name in _ADVICE},
        "schedule": {name: getattr(session.schedule, name) for name in _SCHEDULE},
        "placement": {name: getattr(compressor.placement, name) for name in _PLACEMENT},
        "planner": {name: getattr(session.planner, name) for name in _PLANNER},
        "sites": {place: _site_state(site, places) for site, place in places.items()},
    }


def _options(session: Session) -> dict[str, str]:
    return {name: text_of(getattr(session.config, name)) for name in _OPTIONS}


def _site_state(site: SaveSite, places: dict[SaveSite, Place]) -> dict[str, Any]:
    state = {name: getattr(site, name) for name in _FIELDS}
    state["candidates"] = [(_codec_state(codec), bits) for codec, bits in site.candidates]
    state["distortions"] = [(_codec_state(c), values) for c, values in site.distortions.items()]
    state["shared_by"] = [places[other] for other in site.shared_by if other in places]
    return state


def _codec_state(codec: Codec) -> tuple[Granularity, str | Codebook, Codebook | None]:
    return codec.granularity, codec.codebook, codec.fitted


def _recall(
    session: Session, state: dict[str, Any], forward: Callable[..., Any], inputs: Inputs
) -> bool:
    """Give the sites back what was known of them; False when that must wait for another pass."""
    compressor = session.compressor
    try:
        Calibration(compressor, forward, inputs).visit()
    except NothingToMeasureError:
        return False
    except CalibrationError as error:
        logger.warning("daf_hf: nothing was taken from the checkpoint: %s", str(error))
        return True
    sites = {place_of(key): site for key, site in compressor.tracker.sites.items()}
    for place, known in state["sites"].items():
        site = sites.get(place)
        if site is not None and site.consumers <= known["consumers"]:
            _restore_site(site, known, sites)
    for part, kept in (
        (session, state["session"]),
        (session.advice, state["advice"]),
        (session.schedule, state["schedule"]),
        (compressor.placement, state["placement"]),
        (session.planner, state["planner"]),
    ):
        for name, value in kept.items():
            setattr(part, name, value)
    session.planner.forget()
    return True


def _restore_site(site: SaveSite, known: dict[str, Any], sites: dict[Place, SaveSite]) -> None:
    codecs: dict[Any, Codec] = {}

    def codec(state: Any) -> Codec:
        # One object each: fitted codebooks are told apart by identity.
        return codecs.setdefault(_identity(state), Codec(*state))

    for name in _FIELDS:
        setattr(site, name, known[name])
    site.distortions = {codec(state): values for state, values in known["distortions"]}
    site.candidates = [(codec(state), bits) for state, bits in known["candidates"]]
    site.shared_by = {sites[place] for place in known["shared_by"] if place in sites}


def _identity(state: Any) -> tuple[Any, ...]:
    """Equal for equal codecs of one loaded file, where equal codebooks are one object."""
    return tuple(id(part) if dataclasses.is_dataclass(part) else part for part in state)
