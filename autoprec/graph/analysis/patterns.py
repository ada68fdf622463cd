"""Norms, softmaxes, cross-entropies and attention written by hand, recognised by who feeds whom.

A norm is a reciprocal square root of a mean of squares that scales the very tensor that was squared; a softmax an
exponential divided by its own sum. The operators between are elementwise and would run in low precision: once
recognised they take the class of what they compute.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from autoprec.graph.analysis.linking import MOVES, Links
from autoprec.graph.trace import Call, Ref, Trace

_SQUARES = frozenset({"pow", "mul", "square"})
_MEANS = frozenset({"mean", "sum", "var", "var_mean", "std", "std_mean"})
_SHIFTS = frozenset({"add", "clamp", "clamp_min", "maximum", "mul", "div"})
_SOFTMAXES = frozenset({"_softmax", "_safe_softmax", "softmax"})
_SELECTS = frozenset({"gather", "index", "take_along_dim", "index_select", "mul"})
#: What may stand between log-probabilities and the loss.
_LOSS_PATH = _SELECTS | {"neg", "sub", "add", "where", "masked_fill", "div", "sum", "mean"}


@dataclass(frozen=True, slots=True)
class Pattern:
    """One hand-written operator: rms_norm, layer_norm, l2_norm, softmax, logsumexp, cross_entropy, scores or
    values.

    ``cls`` is the class its calls take; ``calls`` are their indices, in order.
    """

    kind: str
    cls: str
    calls: tuple[int, ...]


class _Finder:
    def __init__(self, trace: Trace, links: Links) -> None:
        self.trace, self.links = trace, links

    def _moves(self, call: Call) -> bool:
        return self.links.classes[call.index] in MOVES

    def source(self, value: int) -> int:
        return self.links.source(self.trace, value)[0]

    # -- norms ----------------------------------------------------------------------------------------------------

    def norms(self, call: Call) -> Iterator[Pattern]:
        """A norm anchored at its (reciprocal) square root, or at a standard deviation."""
        exponent = call.args[1] if call.name == "pow" and len(call.args) > 1 else None
        if call.name == "std":
            yield from self._norm_of(call, call, call.ins[0], centred=True)
        if call.name not in ("rsqrt", "sqrt") and exponent not in (-0.5, 0.5):
            return
        small = call.outs and self.trace.values[call.outs[0]].shape
        for mean in self.trace.above(call.ins[0], lambda c: self._moves(c) or c.name in _SHIFTS or self._differs(c)):
            if mean.name not in _MEANS or not mean.ins or small == ():
                continue
            if mean.name.startswith(("var", "std")):
                yield from self._norm_of(call, mean, mean.ins[0], centred=True)
                return
            square = self._square_before(mean)
            if square is not None:
                base = square.ins[0]
                before = self.trace.producer(self.source(base))
                centred = before is not None and before.name == "sub"
                centred = centred or self._less_a_square(mean)
                yield from self._norm_of(call, mean, base, centred=centred, square=square)
            return

    def _less_a_square(self, mean: Call) -> bool:
        """Say whether something is taken from a mean of squares."""
        return any(c.name == "sub" and i == c.ins[0] for c, i in self.trace.below(mean.outs[0], self._moves, depth=2))

    def _differs(self, call: Call) -> bool:
        """Say whether a call takes the square of a mean from a mean of squares, or makes that difference positive."""
        if call.name in ("abs", "relu"):
            return True
        less = self.trace.producer(self.source(call.ins[1])) if call.name == "sub" and len(call.ins) > 1 else None
        inner = self.trace.producer(self.source(less.ins[0])) if less is not None and less.name in _SQUARES else None
        return inner is not None and inner.name in _MEANS

    def _square_before(self, mean: Call) -> Call | None:
        call = self.trace.producer(self.source(mean.ins[0]))
        if call is None or call.name not in _SQUARES:
            return None
        if call.name == "mul":
            same = len(call.ins) == 2 and self.source(call.ins[0]) == self.source(call.ins[1])
            return call if same else None
        return call if call.name == "square" or (len(call.args) > 1 and call.args[1] == 2) else None

    def _centre(self, value: int) -> int:
        """The tensor before its mean was taken off."""
        value = self.source(value)
        call = self.trace.producer(value)
        return self.source(call.ins[0]) if call is not None and call.name == "sub" and call.ins else value

    def _unweighted(self, value: int) -> int:
        """The tensor before it was multiplied by a weight."""
        call = self.trace.producer(self.source(value))
        if call is None or call.name != "mul":
            return value
        return next((i for i in call.ins if not self.links.parameter_of[i]), value)

    def _norm_of(
        self, root: Call, mean: Call, base: int, *, centred: bool, square: Call | None = None
    ) -> Iterator[Pattern]:
        base = self._centre(base)
        for scaled, read in self.trace.below(
            root.outs[0], lambda c: self._moves(c) or c.name in ("reciprocal", "add", "clamp", "clamp_min")
        ):
            if scaled.name not in ("mul", "div"):
                continue
            others = [i for i in scaled.ins if i != read]
            if any(base in (self._centre(other), self._centre(self._unweighted(other))) for other in others):
                calls = self._between(base, scaled.outs[0])
                kind = "layer_norm" if centred else ("l2_norm" if mean.name == "sum" else "rms_norm")
                known = {c.index for c in (root, mean, scaled, *(() if square is None else (square,)))}
                known |= self._affine(scaled)
                yield Pattern(kind, "norm", tuple(sorted(known | calls)))
                return

    def _affine(self, scaled: Call) -> set[int]:
        """The multiplication by a weight and the addition of a bias that follow a norm."""
        parameter_of, kept = self.links.parameter_of, set()
        for wanted in ("mul", "add"):
            for call, read in self.trace.below(scaled.outs[0], self._moves, depth=3):
                others = [i for i in call.ins if i != read]
                weights = [i for i in others if parameter_of[i]]
                biased = [i for i in weights for maker in [self.trace.producer(i)] if maker and maker.name == "add"]
                if call.name == wanted and weights:  # Gemma multiplies by 1 + weight
                    kept |= {call.index, *(self.trace.values[i].producer for i in biased)}
                    scaled = call
                    break
        return kept

    def _between(self, base: int, end: int) -> set[int]:
        """The calls on the way from ``base`` to ``end`` that are neither products nor fused operators."""
        kept: set[int] = set()
        quiet = ("pointwise", "reduction", "transcendental", "cast", "view", "allocation")
        frontier = [end]
        for _ in range(14):
            following: list[int] = []
            for value in frontier:
                call = self.trace.producer(value)
                if call is None or call.index in kept or self.source(value) == base:
                    continue
                if self.links.classes[call.index] in quiet and call.index > self.trace.values[base].producer:
                    kept.add(call.index)
                    following.extend(call.ins)
            frontier = following
        return kept

    # -- softmax and loss -------------------------------------------------------------------------------------------

    def softmaxes(self, call: Call) -> Iterator[Pattern]:
        """``exp(x) / exp(x).sum()`` and ``exp(x).sum().log()``, with or without the maximum taken off first."""
        if call.name != "exp":
            return
        for total, _ in self.trace.below(call.outs[0], self._moves, depth=3):
            if total.name != "sum":
                continue
            for end, read in self.trace.below(
                total.outs[0],
                lambda c: self._moves(c) or c.name in ("add", "clamp", "reciprocal") or self._by_a_number(c),
            ):
                if end.name in ("div", "mul"):
                    others = [i for i in end.ins if i != read]
                    again = next((one for i in others if (one := self._written_again(i, call)) is not None), None)
                    if again is not None:
                        yield self._softmax("softmax", call, total, end, again)
                        return
                elif end.name == "log":
                    yield self._softmax("logsumexp", call, total, end)
                    return

    @staticmethod
    def _by_a_number(call: Call) -> bool:
        """Say whether a call multiplies a tensor by a number, as ``1 / x`` does after its reciprocal."""
        return call.name == "mul" and len(call.ins) == 1

    def _written_again(self, value: int, exp: Call) -> Call | None:
        """Return the call that made a value, where that is an exponential, or the same one computed once more."""
        made = self.trace.producer(self.source(value))
        same = made is not None and (made.index == exp.index or self._same(value, exp.outs[0]))
        return made if same else None

    def _same(self, one: int, other: int, depth: int = 4) -> bool:
        """Say whether two values are one, or come of the same few operators on the same values."""
        one, other = self.source(one), self.source(other)
        if one == other:
            return True
        made, also = self.trace.producer(one), self.trace.producer(other)
        if not depth or made is None or also is None or (made.name, len(made.ins)) != (also.name, len(also.ins)):
            return False
        quiet = ("pointwise", "reduction", "transcendental")
        if self.links.classes[made.index] not in quiet or self._numbers(made) != self._numbers(also):
            return False
        return all(self._same(i, j, depth - 1) for i, j in zip(made.ins, also.ins, strict=True))

    @staticmethod
    def _numbers(call: Call) -> list[str]:
        """Return what an operator is given that is not a tensor, keyword arguments included."""
        given = (*call.args, *sorted(call.kwargs.items()))
        return [repr(one) for one in given if not isinstance(one, Ref)]

    def _softmax(self, kind: str, exp: Call, total: Call, end: Call, again: Call | None = None) -> Pattern:
        calls = {total.index, end.index} | self._between(exp.outs[0], end.outs[0])
        for one in (exp, again or exp):
            calls.add(one.index)
            shift = self.trace.producer(self.source(one.ins[0]))
            if shift is not None and shift.name == "sub" and len(shift.ins) > 1:
                top = self.trace.producer(self.source(shift.ins[1]))
                if top is not None and top.name in ("amax", "max"):
                    calls |= {shift.index, top.index}
        return Pattern(kind, "softmax", tuple(sorted(calls)))

    def cross_entropies(self, call: Call, logs: set[int], softmaxes: set[int]) -> Iterator[Pattern]:
        """A scalar mean or sum over entries picked out of log-probabilities, or over logarithms of picked ones.

        ``logs`` are the calls of hand-written log-probabilities, ``softmaxes`` those of probabilities, which need a
        logarithm on the way.
        """
        scalar = call.outs and self.trace.values[call.outs[0]].shape == ()
        if call.name not in ("mean", "sum", "div") or not scalar:
            return
        path, selected, logged = [call.index], False, False
        passes = {*_LOSS_PATH, "log"}
        for above in self.trace.above(call.ins[0], lambda c: self._moves(c) or c.name in passes, depth=10):
            if above.index in logs or above.name in ("_log_softmax", "logsumexp", "log_softmax"):
                found = selected
            elif above.index in softmaxes or above.name in _SOFTMAXES:
                found = selected and logged
            else:
                if above.name in passes or self._moves(above):
                    path.append(above.index)
                    selected = selected or above.name in _SELECTS
                    logged = logged or above.name == "log"
                continue
            if found:
                yield Pattern("cross_entropy", "loss", tuple(sorted(path)))
            return

    # -- attention ----------------------------------------------------------------------------------------------------

    def products(self, softmax: set[int]) -> Iterator[Pattern]:
        """Attention's two products: one whose result reaches a softmax, one that a softmax feeds."""
        passes = {"mul", "div", "where", "masked_fill", "add", "native_dropout", "dropout", "sub", "tanh", "cat"}

        def through(call: Call) -> bool:
            return self._moves(call) or call.name in passes or call.name.startswith("bernoulli")

        def is_softmax(call: Call) -> bool:
            return call.index in softmax or call.name in _SOFTMAXES

        for call in self.trace.in_phase("forward", "recompute"):
            if call.name not in ("bmm", "baddbmm", "mm", "matmul") or self.links.classes[call.index] != "attention":
                continue
            if any(
                is_softmax(c) for c in self.trace.above(call.ins[-2 if len(call.ins) > 1 else 0], through, depth=10)
            ):
                yield Pattern("values", "attention", (call.index,))
            elif any(is_softmax(c) for c, _ in self.trace.below(call.outs[0], through, depth=12)):
                yield Pattern("scores", "attention", (call.index,))


def find_patterns(trace: Trace, links: Links) -> list[Pattern]:
    """Return what is recognised, and give the calls of each norm, softmax and loss its class (backward included)."""
    finder = _Finder(trace, links)
    found: list[Pattern] = []
    for call in trace.in_phase("forward", "recompute"):
        if links.classes[call.index] in ("transcendental", "reduction"):
            found.extend(finder.norms(call))
            found.extend(finder.softmaxes(call))
    logs = {index for p in found if p.kind == "logsumexp" for index in p.calls}
    softmaxes = {index for p in found if p.kind == "softmax" for index in p.calls}
    for call in trace.in_phase("forward"):
        found.extend(finder.cross_entropies(call, logs, softmaxes))
    found.extend(finder.products(logs | softmaxes))
    _reclassify(links, found)
    return found


def _reclassify(links: Links, found: list[Pattern]) -> None:
    owner: dict[int, Pattern] = {}
    for pattern in found:
        if pattern.cls == "attention":
            continue
        for index in pattern.calls:
            if links.classes[index] in ("pointwise", "reduction", "transcendental"):
                owner.setdefault(index, pattern)
    for index, pattern in owner.items():
        links.classes[index] = pattern.cls
    for index, forward in links.forward_of.items():
        pattern_of = owner.get(forward.index)
        if pattern_of is not None and links.classes[index] in ("pointwise", "reduction", "transcendental"):
            links.classes[index] = pattern_of.cls
