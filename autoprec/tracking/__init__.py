"""The trials of a study in MLflow, without ever making a search wait for MLflow.

The Optuna study is the durable record of a search. :func:`.log.log_study` reads it and brings MLflow up to date: what
is there already stays as it is. A thread of the search calls it after every trial (:mod:`.listener`), ``autoprec ui``
when it is started; so a server that is dead, slow or full, and a search that was killed, lose nothing.
"""
