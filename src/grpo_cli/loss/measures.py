"""Metrics of a loss: sums, counts and extremes that add up over micro-batches and ranks before anyone divides."""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_cli.loss.tokens import Reduce


class Measures:
    """Means, minima and maxima by metric key; a key without a single measured value is absent from `result`.

    Every rank adds the same keys in every micro-batch, also when it has no trained token: the reductions need that.
    """

    def __init__(self) -> None:
        self._mean: dict[str, Tensor] = {}
        self._highest: dict[tuple[str, int], Tensor] = {}

    def mean(self, key: str, values_T: Tensor, among_T: Tensor) -> None:
        """Add the values [T] where `among_T` [T] bool holds to the mean of `key`."""
        values_T = torch.where(among_T, values_T.detach().double(), 0.0)
        pair = torch.stack([values_T.sum(), among_T.sum().double()])
        self._mean[key] = self._mean[key] + pair if key in self._mean else pair

    def lowest(self, key: str, values_T: Tensor, among_T: Tensor) -> None:
        """Add the values [T] where `among_T` [T] bool holds to the minimum of `key`."""
        self._extreme(key, -1, values_T, among_T)

    def highest(self, key: str, values_T: Tensor, among_T: Tensor) -> None:
        """Add the values [T] where `among_T` [T] bool holds to the maximum of `key`."""
        self._extreme(key, 1, values_T, among_T)

    def _extreme(self, key: str, sign: int, values_T: Tensor, among_T: Tensor) -> None:
        values_T = torch.where(among_T, sign * values_T.detach().double(), -torch.inf)
        found = torch.cat([values_T, values_T.new_tensor([-torch.inf])]).amax()
        known = self._highest.get((key, sign))
        self._highest[key, sign] = found if known is None else torch.maximum(known, found)

    def merge(self, other: Measures) -> Measures:
        """Add what `other` measured; returns self."""
        for key, pair in other._mean.items():
            self._mean[key] = self._mean[key] + pair if key in self._mean else pair
        for name, value in other._highest.items():
            self._highest[name] = torch.maximum(self._highest[name], value) if name in self._highest else value
        return self

    def reduced(self, total: Reduce, largest: Reduce) -> Measures:
        """The measures of all ranks together: two collectives, `total` sums and `largest` takes the maximum."""
        everyone = Measures()
        if self._mean:
            keys = sorted(self._mean)
            everyone._mean = dict(zip(keys, total(torch.stack([self._mean[key] for key in keys])), strict=True))
        if self._highest:
            names = sorted(self._highest)
            values = largest(torch.stack([self._highest[name] for name in names]))
            everyone._highest = dict(zip(names, values, strict=True))
        return everyone

    def result(self) -> dict[str, float]:
        """Metric key to number, without the keys of which nothing was measured."""
        means = {key: pair.tolist() for key, pair in self._mean.items()}
        result = {key: total / count for key, (total, count) in means.items() if count > 0}
        extremes = {name: value.item() for name, value in self._highest.items()}
        return result | {key: sign * value for (key, sign), value in extremes.items() if value != -torch.inf}
