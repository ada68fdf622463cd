"""What is decided: the policy schema, glob matching, loading, saving and comparing."""

from autoprec.policy.diff import diff_policies
from autoprec.policy.document import dump_yaml, explain, load_policy, parse_policy, policy_from_dict, save_policy
from autoprec.policy.globs import Glob, escape, glob_matches, glob_regex
from autoprec.policy.matching import first_match, resolve, unmatched_rules
from autoprec.policy.schema import (
    GUARD_METRICS,
    SCHEMA,
    CommunicationPolicy,
    Guard,
    LayerPlan,
    LayerRule,
    ModelInfo,
    OperatorPolicy,
    OptimizerPolicy,
    Policy,
)

__all__ = [
    "GUARD_METRICS",
    "SCHEMA",
    "CommunicationPolicy",
    "Glob",
    "Guard",
    "LayerPlan",
    "LayerRule",
    "ModelInfo",
    "OperatorPolicy",
    "OptimizerPolicy",
    "Policy",
    "diff_policies",
    "dump_yaml",
    "escape",
    "explain",
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
