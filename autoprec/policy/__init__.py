"""What is decided, and what may be: policies and search spaces as frozen data, in files that need no code to read.

A policy is the answer of a search: an ordered list of globs on module names, each with a recipe (the first that matches
a layer wins, single GEMMs may differ), and one line each for activations, operators, optimizer state, communication,
and loss scaling. It spells out every recipe it uses, so that a file means the same under any version. A
*space* says which of these a search may vary. Nothing here imports torch: a policy is read, compared, exported and
checked where no model is. ``schema`` is the data, ``document`` reads and writes it with errors a person can act on,
``globs`` and ``matching`` find a layer's rule, ``space`` is
the space, ``library`` has what others have published.
"""

from autoprec.policy.diff import diff_policies
from autoprec.policy.document import (
    check_replaceable,
    dump_yaml,
    load_policy,
    parse_policy,
    policy_from_dict,
    save_policy,
)
from autoprec.policy.globs import Glob, escape, glob_matches, glob_regex
from autoprec.policy.matching import first_match, resolve, unmatched_rules
from autoprec.policy.phases import boundaries
from autoprec.policy.schema import (
    GUARD_METRICS,
    Guard,
    LayerPlan,
    LayerRule,
    ModelInfo,
    Phase,
    Policy,
    RolloutPolicy,
    compiles,
)
from autoprec.policy.sections import CommunicationPolicy, ImplementationPolicy, OperatorPolicy, OptimizerPolicy

__all__ = [
    "GUARD_METRICS",
    "CommunicationPolicy",
    "Glob",
    "Guard",
    "ImplementationPolicy",
    "LayerPlan",
    "LayerRule",
    "ModelInfo",
    "OperatorPolicy",
    "OptimizerPolicy",
    "Phase",
    "Policy",
    "RolloutPolicy",
    "boundaries",
    "check_replaceable",
    "compiles",
    "diff_policies",
    "dump_yaml",
    "escape",
    "first_match",
    "glob_matches",
    "glob_regex",
    "load_policy",
    "parse_policy",
    "policy_from_dict",
    "resolve",
    "save_policy",
    "unmatched_rules",
]
