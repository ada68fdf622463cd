"""Amounts as people read them, alike in every command, report and message: memory in GiB, shares, times, counts."""

from __future__ import annotations


def memory_text(size: float | None) -> str:
    """Return bytes in GiB (2**30 bytes), so that two figures compare at a glance; below 0.1 GiB in MiB.

    A size that is not known (None) is a dash.

    >>> memory_text(38_370_000_000), memory_text(2_000_000_000), memory_text(40_000_000)
    ('35.7 GiB', '1.86 GiB', '38.1 MiB')
    """
    if size is None:
        return "–"
    gib = size / 2**30
    if gib < 0.1:
        return f"{size / 2**20:.1f} MiB"
    return f"{gib:,.2f} GiB" if gib < 10 else f"{gib:,.1f} GiB"


def speed_text(speedup: float, low: float | None = None, high: float | None = None) -> str:
    """Return a speed-up with its interval, where that is known.

    >>> speed_text(1.314), speed_text(1.314, 1.28, 1.35)
    ('1.31x', '1.31x [1.28, 1.35]')

    Args:
        speedup: a ratio; 1 is as fast.
        low, high: bounds of its 95 % interval; None where it has none.
    """
    return f"{speedup:.2f}x" + (f" [{low:.2f}, {high:.2f}]" if low is not None and high is not None else "")


def gap_text(gap: float, metric: object = "") -> str:
    """Return how far a run is from its reference, by its losses or by a metric of the script's own.

    >>> gap_text(0.0012), gap_text(0.0012, "eval_loss")
    ('divergence 0.120%', 'eval_loss changed by 0.120%')

    Args:
        gap: a fraction.
        metric: its name; empty for the losses.
    """
    return f"{metric} changed by {gap:.3%}" if metric else f"divergence {gap:.3%}"


def gap_name(metric: object = "") -> str:
    """Return what heads a column of such gaps."""
    return f"{metric} change" if metric else "divergence"


def percent_text(value: float, half_width: float | None = None) -> str:
    """Return a fraction in percent with three significant digits or fewer, and the half width of its interval.

    >>> percent_text(0.0007), percent_text(0.0007, 0.0002), percent_text(0.4)
    ('0.070 %', '0.070 ± 0.020 %', '40.0 %')
    """
    digits = 3 if abs(value) < 0.01 else 2 if abs(value) < 0.1 else 1
    about = "" if half_width is None else f" ± {100 * half_width:.{digits}f}"
    return f"{100 * value:.{digits}f}{about} %"


def time_text(ms: float) -> str:
    """Return milliseconds.

    >>> time_text(1.5), time_text(666.66)
    ('1.5 ms', '666.7 ms')
    """
    return f"{ms:.1f} ms" if ms >= 10 else f"{ms:.3g} ms"


def parameters_text(count: int) -> str:
    """Return a number of parameters, two digits of it at least.

    >>> parameters_text(8705), parameters_text(2_236_000), parameters_text(8_030_000_000)
    ('8,705 parameters', '2.2 M parameters', '8.0 B parameters')
    """
    for unit, size in (("B", 1e9), ("M", 1e6)):
        if count >= size:
            return f"{count / size:.1f} {unit} parameters"
    return f"{count:,} parameters"


def counted(count: int, thing: str) -> str:
    """Return a number of things, one of them in the singular.

    >>> counted(1, "trial"), counted(3, "trial"), counted(0, "trial")
    ('1 trial', '3 trials', '0 trials')
    """
    return f"{count} {thing}" if count == 1 else f"{count} {thing}s"


def span_text(seconds: float) -> str:
    """Return seconds in the unit a person would use: ``45 s``, ``12 min``, ``3.5 h``, ``1,200 days``."""
    for unit, size, limit in (("s", 1.0, 120.0), ("min", 60.0, 7200.0), ("h", 3600.0, 172800.0)):
        if seconds < limit:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 86400:,.3g} days"
