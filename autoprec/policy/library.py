"""Policies that others have published, by role: which layers stay high, at which source, with what evidence.

Everyone names layers in his own way, so a published policy says *roles* (attention input, router, head) and *blocks*
(the first two, the last 15 %), and is made a policy of one model by :mod:`autoprec.tuning.decide.published`. The files
are data in ``autoprec/policy/published/``.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from autoprec.errors import PolicyError, UnknownNameError
from autoprec.policy import CommunicationPolicy, OperatorPolicy, OptimizerPolicy, Policy
from autoprec.policy.document import PUBLISHED
from autoprec.policy.space import Blocks, Choice
from autoprec.precision.recipes import BUILTIN_RECIPES, KEEP, Gemm, Recipe
from autoprec.support.files import read_document
from autoprec.support.validation import Frozen, validated

#: What a policy on the command line begins with that is one of these, and what ends one that is fitted to a depth.
PREFIX, SCALED = PUBLISHED, ":scaled"

#: Roles that rules may name: those of ``autoprec/graph/roles.py``, some of them divided by the words of a name.
Role = Literal[
    "embedding",
    "head",
    "router",
    "latent",
    "mtp",
    "conv",
    "attention.qkv",
    "attention.q",
    "attention.k",
    "attention.v",
    "attention.out",
    "cross_attention.qkv",
    "cross_attention.out",
    "mixer.in",
    "mixer.inner",
    "mixer.out",
    "mlp.in",
    "mlp.gate",
    "mlp.up",
    "mlp.out",
    "expert.in",
    "expert.out",
    "shared_expert.in",
    "shared_expert.out",
]
#: A role that is part of another: the key projection of the attention input.
WITHIN: dict[str, str] = {
    **{f"attention.{part}": "attention.qkv" for part in "qkv"},
    **{f"mlp.{part}": "mlp.in" for part in ("gate", "up")},
}


class RoleRule(Frozen):
    """What some layers run: those of the roles (all, where none is named) in the blocks (all, and outside of them)."""

    use: str = Field(description="a recipe, and others for single GEMMs: nvfp4/wgrad=bf16")
    roles: tuple[Role, ...] = ()
    blocks: Blocks | None = None

    @model_validator(mode="after")
    def _about_something(self) -> RoleRule:
        if not self.roles and self.blocks is None:
            raise ValueError("a rule names roles, blocks or both; what has no rule runs the policy's own 'use'")
        return self


class Small(Frozen):
    """Sizes of a weight ``[N, K]`` that are too small to gain: at most so many outputs and inputs; None for any."""

    n: int | None = Field(None, gt=0)
    k: int | None = Field(None, gt=0)


class Sizes(Frozen):
    """Which linear layers a library converts where its own filter decides; all others stay as the script wrote them."""

    multiple: int = Field(1, ge=1, description="that N and K are both of")
    small: tuple[Small, ...] = ()

    def take(self, n: int, k: int) -> bool:
        """Say whether a layer with a weight ``[N, K]`` is converted.

        Args:
            n, k: outputs and inputs of the layer.
        """
        few = any((one.n is None or n <= one.n) and (one.k is None or k <= one.k) for one in self.small)
        return n % self.multiple == k % self.multiple == 0 and not few

    @property
    def text(self) -> str:
        """In words: which layers are left out."""
        found = [f"N or K is not a multiple of {self.multiple}"] if self.multiple > 1 else []
        for one in self.small:
            bounds = [f"{name} <= {most}" for name, most in (("N", one.n), ("K", one.k)) if most is not None]
            found.append(" and ".join(bounds))
        return "; ".join(found)


class Tail(Frozen):
    """What is different from a share of the run on: single GEMMs of the layers that run the policy's own recipe."""

    start: float = Field(alias="from", gt=0.0, lt=1.0)
    gemms: dict[Gemm, str] = Field(min_length=1)


class Published(Frozen):
    """One published policy.

    Attributes:
        families: words of model classes it was published for (``llama``); empty: for any.
        blocks: of the model it was published for; 0 where its rules do not count blocks, or that is not published.
        use: what every tunable layer runs that no rule is about.
        sizes: the library's own filter of nn.Linear; without one, any layer that can be tuned.
        compiled: it is for models under ``torch.compile``, without which it is slower than bf16.
        rules: the first that is about a layer decides. Two that name one role in the same blocks are refused.
    """

    name: str = Field(pattern=r"[a-z0-9.-]+")
    title: str
    families: tuple[str, ...] = ()
    source: str
    date: str
    blocks: int = Field(0, ge=0)
    use: str = Field(min_length=1)
    recipes: dict[str, Recipe] = Field(default_factory=dict)
    sizes: Sizes | None = None
    compiled: bool = False
    rules: tuple[RoleRule, ...] = ()
    tail: Tail | None = None
    activations: Literal["keep", "bf16"] = "bf16"
    operators: OperatorPolicy = OperatorPolicy()
    optimizer: OptimizerPolicy = OptimizerPolicy()
    communication: CommunicationPolicy = CommunicationPolicy()
    evidence: tuple[str, ...] = Field(min_length=1)
    not_published: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _resolves(self) -> Published:
        known, tail = self.all_recipes, {} if self.tail is None else self.tail.gemms
        for name in (*self.choices, *tail.values()):
            Choice.parse(name).check(known)
        seen: dict[tuple[Any, str], int] = {}
        for index, rule in enumerate(self.rules):
            for role in rule.roles:
                for other in (role, WITHIN.get(role, role), *(part for part in WITHIN if WITHIN[part] == role)):
                    if (rule.blocks, other) in seen:
                        raise ValueError(
                            f"rules[{index}]: '{role}' is named twice in the same blocks, in "
                            f"rules[{seen[rule.blocks, other]}] as '{other}'; name it in one rule"
                        )
                seen[rule.blocks, role] = index
        return self

    @property
    def all_recipes(self) -> dict[str, Recipe]:
        """Every recipe by the name that rules give it."""
        return {**BUILTIN_RECIPES, **self.recipes}

    @property
    def choices(self) -> tuple[str, ...]:
        """What its layers run, in the order of the rules, without repetition."""
        return tuple(dict.fromkeys((*(rule.use for rule in self.rules), self.use)))

    def around(self) -> Policy:
        """Return the policy without layers: what surrounds them."""
        names = ("activations", "operators", "optimizer", "communication")
        return Policy(**{name: getattr(self, name) for name in names})

    def lines(self) -> list[str]:
        """Return what runs where, a rule a line, as a person reads it."""
        out = []
        for rule in self.rules:
            where = [", ".join(rule.roles), "" if rule.blocks is None else rule.blocks.text]
            out.append(f"{' in '.join(filter(None, where))}: {rule.use}")
        if self.sizes is not None:
            out.append(f"what is not an nn.Linear, or where {self.sizes.text}: {KEEP}")
        out.append(f"everything else: {self.use}")
        if self.tail is not None:
            changed = ", ".join(f"{gemm} {name}" for gemm, name in self.tail.gemms.items())
            out.append(f"from {self.tail.start:.0%} of the run on: {changed} where {self.use} is")
        return out


def _folder() -> Path:
    return Path(__file__).resolve().parent / "published"


def published_names() -> list[str]:
    """Return the names of the policies that ship."""
    return sorted(path.stem for path in _folder().glob("*.yaml"))


def is_published(text: str) -> bool:
    """Say whether what stands for a policy names a published one."""
    return str(text).startswith(PREFIX)


@lru_cache(maxsize=64)
def published(name: str) -> Published:
    """Return a published policy, with ``published:`` before its name or without, ``:scaled`` behind it or not.

    Raises:
        UnknownNameError: with the nearest name.
        PolicyError: its file is not valid.
    """
    plain = name.removeprefix(PREFIX).removesuffix(SCALED)
    if plain not in published_names():
        raise UnknownNameError("published policy", plain, published_names())
    return read_published(_folder() / f"{plain}.yaml")


def read_published(path: Path) -> Published:
    """Read one file.

    Raises:
        PolicyError: not a valid published policy.
    """
    document = {"name": path.stem, **read_document(path)}
    return validated(Published, document, where=str(path), about="policy-format", error=PolicyError)
