"""The contest's format: read with its oddities, written so that every assignment costs what it did."""

from __future__ import annotations

import gzip
import json
import math
from pathlib import Path

import numpy as np
import pytest

from jaxplan.errors import ArgumentError, PlanFileError
from jaxplan.search import Termination, evaluate, exhaustive, read_contest, solve, write_contest
from jaxplan.search.contest import contest_text
from tests.search.problems import random_problem

FORBIDDEN = 10**18

#: In the contest's format, with each of its oddities: a pair and a strategy priced as forbidden, a node
#: without memory. By hand: node 0 may only take 0 (its 1 is forbidden), then node 1 not 0; 1 costs 4 + 1 but
#: needs 30 + 80 bytes of 100.
CONTEST = {
    "problem": {
        "name": "toy",
        "nodes": {
            "intervals": [[0, 4], [2, 5], [0, 0]],
            "costs": [[10, FORBIDDEN], [0, 4, 9], [3, 2]],
            "usages": [[30, 1], [5, 80, 70], [1000, 1000]],
        },
        "edges": {
            "nodes": [[0, 1], [1, 2]],
            "costs": [[FORBIDDEN, 1, 2, 0, 0, 0], [0, 5, 0, 5, 6, 1]],
        },
        "usage_limit": 100,
    }
}


@pytest.mark.parametrize("suffix", [".json", ".json.gz"])
def test_the_contest_format(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"toy{suffix}"
    raw = json.dumps(CONTEST).encode()
    path.write_bytes(gzip.compress(raw) if suffix.endswith("gz") else raw)
    problem = read_contest(path).problem
    result = solve(problem)
    assert result.termination is Termination.OPTIMAL
    assert result.assignment[:3] == (0, 2, 1)
    assert result.objective_s == 10 + 9 + 2 + 2 + 1
    assert result.peak_bytes == 100
    assert not evaluate(problem, (0, 1, 0)).feasible  # 110 bytes
    assert evaluate(problem, (0, 0, 0)).forbidden == (0,)
    assert not evaluate(problem, (1, 2, 1)).feasible  # a strategy forbidden by itself


def test_a_lone_forbidden_strategy_is_kept_out(tmp_path: Path) -> None:
    lone = {"nodes": {"intervals": [[0, 0]], "costs": [[FORBIDDEN, 8]], "usages": [[0, 0]]}}
    path = tmp_path / "lone.json"
    path.write_text(json.dumps({"problem": {**lone, "edges": {"nodes": [], "costs": []}}}))
    problem = read_contest(path).problem
    assert problem.limit_bytes is None
    assert solve(problem).objective_s == 8


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"problem": {"nodes": {}}}', '{"problem": 3}'])
def test_what_is_no_problem_is_refused_by_name(tmp_path: Path, text: str) -> None:
    path = tmp_path / "wrong.json"
    path.write_text(text)
    with pytest.raises(PlanFileError, match=r"wrong\.json is no problem.*usage_limit"):
        read_contest(path)


@pytest.mark.parametrize("name", ["problem.json", "problem.json.gz"])
def test_written_and_read_every_assignment_costs_the_same(tmp_path: Path, name: str) -> None:
    split = 0
    for seed in range(60):
        problem = random_problem(seed, most_nodes=5)
        path = tmp_path / name
        write_contest(problem, path, 1e-12)
        again = read_contest(path).problem
        content = json.loads(contest_text(problem, 1e-12))["problem"]
        split += len(content["nodes"]["costs"]) > len(problem.nodes)
        rng = np.random.default_rng(seed)
        for _ in range(20):
            chosen = [int(rng.integers(node.costs_s.size)) for node in problem.nodes]
            # Followers choose as the node that they belong to; a forbidden strategy may have its anchor.
            owners = {pair[1]: pair[0] for pair in content["edges"]["nodes"] if pair[1] >= len(problem.nodes)}
            extended = chosen + [chosen[owners[n]] for n in range(len(problem.nodes), len(content["nodes"]["costs"]))]
            extended += [0] * (len(again.nodes) - len(extended))
            before, after = evaluate(problem, chosen), evaluate(again, extended)
            assert bool(before.forbidden) == bool(after.forbidden)
            assert before.peak_bytes == after.peak_bytes
            if not before.forbidden:
                terms = len(problem.nodes) + len(problem.edges)
                assert after.objective_s * 1e-12 == pytest.approx(before.objective_s, rel=1e-9, abs=terms * 1e-12)
        assert again.limit_bytes == problem.limit_bytes
    assert split > 10


def test_the_optimum_survives_the_way_there_and_back(tmp_path: Path) -> None:
    for seed in range(100, 130):
        problem = random_problem(seed, most_nodes=5)
        optimum = exhaustive.solve(problem)
        path = tmp_path / "problem.json"
        write_contest(problem, path, 1e-12)
        contest = read_contest(path)
        result = solve(contest.problem, relative_gap=0.0)
        assert result.termination is optimum.termination
        if math.isfinite(optimum.objective_s):
            choices = contest.choices(result.assignment)[: len(problem.nodes)]
            assert evaluate(problem, choices).objective_s == pytest.approx(optimum.objective_s, rel=1e-9, abs=1e-10)


def test_a_unit_too_small_for_the_costs_is_refused() -> None:
    problem = random_problem(3)
    with pytest.raises(ArgumentError, match="larger unit"):
        contest_text(problem, 1e-30)
