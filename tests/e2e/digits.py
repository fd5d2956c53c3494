"""A reward that a model can earn that learned nothing: one answer in ten begins with a digit."""


def score(data_source, solution_str, ground_truth, extra_info):
    return float(solution_str[:1].isdigit())
