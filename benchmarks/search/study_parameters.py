"""What a search really varied, read from Optuna's database as any other program reads it.

python benchmarks/search/study_parameters.py autoprec-runs/STUDY/study.db
python benchmarks/search/study_parameters.py autoprec-runs/STUDY/study.db --dashboard http://127.0.0.1:8080

Distinct values per parameter, counted over all trials and over those in which the parameter's recipe runs in some
layer; what the head ran in how many trials, with its divergence. ``--dashboard`` asks an optuna-dashboard that serves
the same database (``optuna-dashboard sqlite:///...``) whether it shows every parameter and objective of every trial.
"""

from __future__ import annotations

import argparse
import json
import urllib.request
from collections import defaultdict
from typing import Any

import optuna


def recipes_of(trial: optuna.trial.FrozenTrial) -> set[str]:
    """Return the recipes that some layer runs in a trial."""
    choices = [str(value) for name, value in trial.params.items() if name.startswith("layer:")]
    return {part.partition("=")[2] or part for choice in choices for part in choice.split("/")}


def distinct(study: optuna.Study) -> list[tuple[str, int, int]]:
    """Return (parameter, distinct values in all trials, distinct values where it has an effect)."""
    every: dict[str, set[str]] = defaultdict(set)
    effective: dict[str, set[str]] = defaultdict(set)
    for trial in study.trials:
        ran = recipes_of(trial)
        for name, value in trial.params.items():
            every[name].add(str(value))
            if name.startswith("layer:") or "." not in name or name.split(".")[0] in ran:
                effective[name].add(str(value))
    return [(name, len(values), len(effective[name])) for name, values in every.items()]


def heads(study: optuna.Study, name: str) -> list[tuple[str, int, float]]:
    """Return (choice of the head, trials, least divergence)."""
    found: dict[str, list[float]] = defaultdict(list)
    for trial in study.trials:
        if name in trial.params and trial.values:
            found[str(trial.params[name])].append(trial.values[-1])
    return [(choice, len(gaps), min(gaps)) for choice, gaps in found.items()]


def dashboard(study: optuna.Study, url: str) -> str:
    """Compare what an optuna-dashboard shows with the database."""

    def ask(path: str) -> Any:
        with urllib.request.urlopen(url.rstrip("/") + path, timeout=60) as answer:
            return json.load(answer)

    listed = ask("/api/studies")
    rows = listed.get("studies") or listed["study_summaries"]
    row = next(row for row in rows if study.study_name in (row.get("name"), row.get("study_name")))
    shown = ask(f"/api/studies/{row.get('id', row.get('study_id'))}?after=0")
    ours = {trial.number: trial for trial in study.trials}
    same = objectives = 0
    for trial in shown["trials"]:
        mine = ours[trial["number"]]
        params = {item["name"]: item["param_external_value"] for item in trial["params"]}
        same += {name: str(value) for name, value in mine.params.items()} == {n: str(v) for n, v in params.items()}
        objectives += [float(value) for value in trial.get("values") or []] == list(mine.values or [])
    names = {name for trial in study.trials for name in trial.params}
    missing = names - {item["name"] for item in shown["union_search_space"]}
    return (
        f"dashboard: {same} of {len(ours)} trials with every parameter, {objectives} with every objective, "
        f"{len(names) - len(missing)} of {len(names)} parameters in its search space"
    )


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("database")
    parser.add_argument("--dashboard", metavar="URL", default="")
    parser.add_argument("--head", default="layer:head", help="the head's parameter")
    options = parser.parse_args()
    study = optuna.load_study(study_name=None, storage=f"sqlite:///{options.database}")
    print(f"{study.study_name}: {len(study.trials)} trials, objectives {study.metric_names or study.directions}")
    rows = distinct(study)
    for name, values, effective in rows:
        if not name.startswith("layer:"):
            print(f"  {name}: {values} values, {effective} where it has an effect")
    varied = sum(effective > 1 for name, _, effective in rows if "." in name and not name.startswith("layer:"))
    print(f"recipe parameters with two values or more that had an effect: {varied}")
    for choice, count, gap in heads(study, options.head):
        print(f"  head {choice}: {count} trials, least divergence {gap:.5%}")
    if options.dashboard:
        print(dashboard(study, options.dashboard))


if __name__ == "__main__":
    main()
