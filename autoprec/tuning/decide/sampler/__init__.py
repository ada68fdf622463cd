"""How our Optuna sampler decides which policy to try next.

A trial costs a training run of some seconds to minutes, and there are a hundred layers with half a dozen choices each;
TPE or NSGA-II on such a space may find nothing better than uniform bf16 in 240 trials. But a great deal is known before
the first trial: the sensitivity scan says what each layer adds to the squared gradient error, the cost model what it
saves.

1. **Prior** (:mod:`.prior`): these two tables are the prior means.
2. **Posterior** (:mod:`.posterior`): two small Bayesian models, one of ln(divergence) and one of step time (a third of
   memory), are refitted to every finished trial. They are linear-Gaussian in what they correct (a factor for the whole
   table, for each choice, family of layers, layer and entry), so that forty trials can correct a thousand entries.
3. **Posterior sample** (:mod:`.posterior_sample`): one draw from the posterior is a complete pair of tables. Given such
   a draw nothing is uncertain: the knapsack (:mod:`autoprec.tuning.decide.solver`) gives its whole Pareto front.
4. **Ask** (:mod:`.sampler`): in part of the trials the fastest point of the draw within the divergence budget, in the
   others the point of the front that adds most hypervolume to what was asked so far. This is Thompson sampling: a
   point is asked for as often as it is, by all that is known, the best one to ask for.

:mod:`.other_samplers` has Optuna's own and the two strategies of existing tools, for comparison.
"""
