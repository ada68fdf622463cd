"""Run a training script that knows nothing of AutoPrec, under hooks, and measure a few of its steps.

Two sides talk here, and the folders keep them apart. The **driver** (``driver/``, free of torch) is the user's
``autoprec`` process: it starts the script, asks for trials and survives whatever they do. The other side (``inside/``)
runs in the script's own process: hooks that enter with the import of torch (``inside/_inject``), watch the loop
(``inside/observe``), keep it from touching the user's files (``inside/isolate``), and wait at the script's first
training forward. The process stopped there is the *host*: it has the weights, the data position and the random streams
that every trial must start from, so a *trial* is a fork of it (launch mode ``fork``), which trains twenty steps under a
policy, writes a result and ends. A process that holds CUDA or a process group cannot be forked: its trials start from
a copy kept after the imports (``zygote``), or from nothing (``process``). What both sides share lies beside this file:
``protocol`` (what is asked and answered), ``command``, ``environment``, ``messages``, ``processes``, and ``session``
for loops that name themselves. Nothing is imported here: name the file.
"""
