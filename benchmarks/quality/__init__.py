"""What freezing costs in AUC and saves in bytes, policy by policy, through the real engine in process.

stream.py makes samples with a planted truth, samples.py names the data; contestants.py names policies and rivals,
rivals.py holds what is not a policy of ours; training.py runs one case, cases.py lists those of a study, results.py
keeps them; auc.py, comparison.py and acceptance.py compare; chart.py draws. `python -m benchmarks.quality` runs a study
and writes benchmarks/results/quality.json and quality.png.
"""
