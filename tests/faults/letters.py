"""A reward that differs between any two answers of a model that has learned nothing."""


def score(data_source, solution_str, ground_truth, extra_info):
    return sum(map(ord, solution_str)) % 11 / 11
