"""The literature's experiments, as recipes: its models, its training set-up, its figures.

`table` says what a recipe is and which there are; `texts` reads its data; `lstm` and `step` are the
model and a training step; `example` is the public example's plain loop beside which ours is timed;
`job` trains one arm with one seed, `run` all of them in processes of one thread each; `result`
sets ours beside the published figures.
"""
