"""How our Optuna sampler decides which policy to try next, and when to stop.

A trial costs a training run of some seconds to minutes, and there are a hundred layers with half a dozen choices each;
TPE or NSGA-II on such a space may find nothing better than uniform bf16 in 240 trials. But a great deal is known before
the first trial: the sensitivity scan says what each layer adds to the squared gradient error, the cost model what it
saves.

1. **Prior** (:mod:`.prior`): these two tables are the prior means.
2. **Posterior** (:mod:`.posterior`): two linear-Gaussian models, one of ln(divergence) and one of step time (a third of
   memory), are refitted to every run. Policies share layers, so each run says something about all of them.
3. **Expectation** (:mod:`.expectation`): for any policy the chance that it turns out acceptable, what it would gain,
   and how many runs it takes to be sure.
4. **Ask** (:mod:`.sampler`): the knapsack (:mod:`autoprec.policy.solver`) gives the front by the models; the
   point of it (or the preset) with the largest expected gain per run is tried, until that gain is too small.
"""
