"""Optuna's tables, asked less: what a transaction has just written of a trial it does not read again.

Optuna looks for the trial before each of its forty values, for that of an earlier trial before each parameter, and
stores each by itself: a thousand statements for fifteen runs, two fifths of what a simulated search takes. What is
stored is the same (tests/tuning/study/test_study.py). And the newest version of the tables, which Alembic reads out of
scripts that it compiles, is that of the first database a process opens.
"""

from __future__ import annotations

import json
from typing import Any

#: What Optuna does, by name of the method.
WHOLE: dict[str, Any] = {}


def ask_less() -> None:
    """From now on, in this process and its forks, a new trial is taken from its own session and stored at once."""
    from optuna.storages._rdb.models import TrialModel
    from optuna.storages._rdb.storage import RDBStorage, _VersionManager

    if WHOLE:
        return
    find, set_param = TrialModel.find_or_raise_by_id, RDBStorage._set_trial_param_without_commit
    set_attr = RDBStorage._set_trial_attr_without_commit
    WHOLE.update(find=find, set_param=set_param, set_attr=set_attr)
    newest, versions = _VersionManager.get_head_version, list[str]()

    def held(trial_id: int, session: Any, for_update: bool = False) -> Any:
        found = None if for_update else session.get(TrialModel, trial_id)
        return find(trial_id, session, for_update) if found is None else found

    def set_known(
        self: Any, session: Any, trial_id: int, name: str, value: float, distribution: Any, previous: Any = None
    ) -> None:
        key, known = (held(trial_id, session).study_id, name), self.__dict__.setdefault("_known_distributions", {})
        set_param(self, session, trial_id, name, value, distribution, previous or known.get(key))
        known[key] = distribution

    def add_attr(self: Any, session: Any, table: Any, trial_id: int, key: str, value: Any) -> None:
        if held(trial_id, session).number is None:  # it is being made, so that nothing is replaced
            session.add(table(trial_id=trial_id, key=key, value_json=json.dumps(value)))
        else:
            set_attr(self, session, table, trial_id, key, value)

    def known_newest(self: Any) -> str:
        versions.extend([] if versions else [newest(self)])
        return versions[0]

    _VersionManager.get_head_version = known_newest
    TrialModel.find_or_raise_by_id = held
    RDBStorage._set_trial_param_without_commit = set_known
    RDBStorage._set_trial_attr_without_commit = add_attr
