"""Which experts tokens are routed to: counts of a run, and a layer's experts in two parts."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from placement.importers._read import FormatError
from placement.importers.decoder import Decoder, Part
from placement.tools.files import read_file

COLUMNS = ("layer", "expert", "count")


def with_counts(decoder: Decoder, path: str | Path) -> Decoder:
    """The decoder with ``shares`` of its experts, from a CSV of ``layer, expert, count``.

    A line says how many tokens of a run chose an expert; experts without a line were not chosen.
    Layers are numbered as in the model, from 0, dense ones too.

    Raises:
        FormatError: not such a file, or counts of another model.
    """
    counts = _read(path)
    routed = {part.layer: part for part in decoder.parts if part.num_experts}
    if not routed:
        raise FormatError(f"{path}: {decoder.name} has no experts: leave --experts out")
    for layer, expert in counts:
        if layer not in routed:
            has = f"layers 0 to {decoder.num_layers - 1}"
            if layer < decoder.num_layers:
                has = f"experts in {len(routed)} of its {decoder.num_layers} layers, not there"
            raise FormatError(f"{path}: layer {layer}: {decoder.name} has {has}")
        if expert >= routed[layer].num_experts:
            raise FormatError(
                f"{path}: layer {layer} counts expert {expert}: {decoder.name} has experts 0 to "
                f"{routed[layer].num_experts - 1} there"
            )
    shares = {
        layer: _shares([counts.get((layer, e), 0.0) for e in range(part.num_experts)], part, path)
        for layer, part in routed.items()
    }
    parts = (replace(p, shares=shares[p.layer]) if p.num_experts else p for p in decoder.parts)
    return replace(decoder, parts=tuple(parts))


def _read(path: str | Path) -> dict[tuple[int, int], float]:
    """Counts by layer and expert."""
    try:
        text = read_file(path).decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise FormatError(f"{path}: cannot be read: {error}") from error
    rows = csv.DictReader(text.splitlines())
    try:
        return _counts(rows, path)
    except csv.Error as error:
        raise FormatError(f"{path}: not a CSV file: {error}") from error


def _counts(rows: csv.DictReader[str], path: str | Path) -> dict[tuple[int, int], float]:
    if missing := [name for name in COLUMNS if name not in (rows.fieldnames or ())]:
        raise FormatError(
            f"{path}: no column {missing[0]!r}: the first line must name {', '.join(COLUMNS)}"
        )
    counts: dict[tuple[int, int], float] = {}
    for row in rows:
        where = f"{path}: line {rows.line_num}"
        words = [str(row[name] or "").strip() for name in COLUMNS]
        try:
            layer, expert, count = int(words[0]), int(words[1]), float(words[2])
        except ValueError as error:
            raise FormatError(f"{where}: {','.join(words)[:60]!r} is not three numbers") from error
        if min(layer, expert) < 0 or not 0 <= count < math.inf:
            raise FormatError(f"{where}: {','.join(words)[:60]}: numbers must be at least 0")
        if (layer, expert) in counts:
            raise FormatError(f"{where}: layer {layer}, expert {expert} is there twice")
        counts[layer, expert] = count
    return counts


def _shares(counts: Sequence[float], part: Part, path: str | Path) -> tuple[float, ...]:
    """Of each expert the share of tokens that choose it, where each chooses so many."""
    chosen = round(part.used * part.num_experts)
    total = sum(counts)
    if not total:
        raise FormatError(f"{path}: nothing is counted in layer {part.layer}, which has experts")
    shares = np.array(counts) / total * chosen
    if shares.max() > 1.0 + 1e-6:  # a run may count some more tokens in one layer
        most = int(shares.argmax())
        raise FormatError(
            f"{path}: expert {most} of layer {part.layer} has {counts[most]:g} of {total:g} "
            f"counts, a share of {shares[most]:.2f} of the tokens: a token chooses {chosen} "
            f"different experts, so that one has at most {total / chosen:g} of the counts"
        )
    return tuple(np.minimum(shares, 1.0).tolist())


def hottest(decoder: Decoder, num: int) -> dict[int, NDArray[np.bool_]]:
    """By layer bool ``[E]``: the ``num`` experts of all layers that are read most for their bytes.

    A fractional knapsack: seconds saved per byte are the share of tokens that read an expert,
    the same factor for all. Of equal shares those of the first layers, which are whole then.
    """
    routed = [part for part in decoder.parts if part.num_experts]
    if not routed:
        return {}
    shares = np.concatenate([p.shares or [p.used] * p.num_experts for p in routed])
    hot = np.zeros(len(shares), bool)
    hot[np.argsort(-shares, kind="stable")[:num]] = True
    ends = np.cumsum([p.num_experts for p in routed])[:-1]
    return dict(zip((p.layer for p in routed), np.split(hot, ends), strict=True))


def split(decoder: Decoder, hot: Mapping[int, NDArray[np.bool_]]) -> Decoder:
    """The decoder with the hot experts of a layer (``#0``) and its others (``#1``) as two parts."""
    parts: list[Part] = []
    for part in decoder.parts:
        if not part.num_experts:
            parts.append(part)
            continue
        mask = hot[part.layer]
        both = [_some(part, mask, 0), _some(part, ~mask, 1)]
        parts += [x for x in both if x.num_experts]
    return replace(decoder, parts=tuple(parts))


def _some(part: Part, mask: NDArray[np.bool_], piece: int) -> Part:
    """These experts of a part."""
    count, num = int(mask.sum()), part.num_experts
    shares = np.array(part.shares or [part.used] * num)[mask]
    name = f"{part.name}#{piece}"
    # What is rounded down of the first part is of the second.
    sizes = {
        f"{key}#{piece}": size * count // num if piece == 0 else size - size * (num - count) // num
        for key, size in part.weights.items()
    }
    used = float(shares.mean()) if count else 0.0
    return replace(
        part,
        name=name,
        weights=sizes,
        numel=part.numel * count / num,
        used=used,
        num_experts=count,
        shares=tuple(shares.tolist()),
        experts=tuple(np.flatnonzero(mask).tolist()),
    )
