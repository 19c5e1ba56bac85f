"""The stage-partition problem as a CP-SAT model; the only module that imports OR-Tools.

Integers in, integers out: nothing here knows what a transformer is. Layers 0 .. L-1 of several
kinds are cut into consecutive stages; a stage may recompute some of its layers, all the same
number k or all that it has.

    edge[s]        first layer of stage s; edge[0] = 0, edge[S] = L
    recomputed     k, between two given limits
    redone[s]      min(k, edge[s+1] - edge[s])

    minimise  score = max over s of
                  base[s] + sum over layers i of s of cost[s][kind i] + redo_cost[s] * redone[s]

    every_layer    edges ascend by at least one: each layer is on exactly one stage, none is empty
    memory         held[s] + sum of holds[s][kind i] - saved[s] * redone[s] <= capacity,
                   with brought_back[s] on top where redone[s] is all that the stage has
    beats          score <= cutoff
    new            no split that is named in `excluded` comes back, whatever its k

Sums over a stage are differences of prefix sums: linear where all layers are of one kind, element
constraints else. The solver is bounded by deterministic time alone, runs one worker with a fixed
seed and starts from the hint, so the same problem gives the same answer everywhere.
"""

from dataclasses import dataclass
from itertools import accumulate, pairwise

from ortools.sat.python import cp_model

from planner.search.stage_problem import StageProblem, StageSolution, largest_score

SEED = 7
DETERMINISTIC_SECONDS = 10.0  # chosen: a hundred times what 16 stages of 126 layers take


@dataclass(frozen=True, slots=True, kw_only=True)
class _Variables:
    edges: list[cp_model.IntVar]
    lengths: list[cp_model.LinearExpr]
    recomputed: cp_model.IntVar
    redone: list[cp_model.LinearExpr]
    score: cp_model.IntVar


def solve(problem: StageProblem) -> StageSolution:
    """Return the split with the smallest score, proved.

    Raises:
        ValueError: There are fewer layers than stages.
        RuntimeError: The deterministic time ended before an answer.

    """
    if problem.num_layers < problem.num_stages:
        raise ValueError(f"{problem.num_layers} layers do not fill {problem.num_stages} stages")
    model = cp_model.CpModel()
    variables = _declare(model, problem)
    _every_layer(model, problem, variables)
    _scores(model, problem, variables)
    _memory(model, problem, variables)
    _new(model, problem, variables)
    model.minimize(variables.score)
    _hint(model, problem, variables)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = SEED
    solver.parameters.max_deterministic_time = DETERMINISTIC_SECONDS
    status = solver.solve(model)
    if status == cp_model.INFEASIBLE:
        bound = largest_score(problem) if problem.cutoff is None else problem.cutoff + 1
        return StageSolution(layers_per_stage=(), recomputed=0, score=bound, bound=bound)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        raise RuntimeError(
            f"CP-SAT says {solver.status_name(status)} for {problem.num_layers} layers on "
            f"{problem.num_stages} stages after {DETERMINISTIC_SECONDS} deterministic seconds"
        )
    edges = [solver.value(edge) for edge in variables.edges]
    return StageSolution(
        layers_per_stage=tuple(b - a for a, b in pairwise(edges)),
        recomputed=solver.value(variables.recomputed),
        score=solver.value(variables.score),
        bound=round(solver.best_objective_bound),
    )


def _declare(model: cp_model.CpModel, problem: StageProblem) -> _Variables:
    stages, layers = problem.num_stages, problem.num_layers
    edges = [
        model.new_int_var(s, layers - (stages - s), f"edge_{s}")
        if 0 < s < stages
        # The ends are fixed.
        else model.new_constant(0 if s == 0 else layers)
        for s in range(stages + 1)
    ]
    largest = largest_score(problem)
    return _Variables(
        edges=edges,
        lengths=[edges[s + 1] - edges[s] for s in range(stages)],
        recomputed=model.new_int_var(
            problem.least_recomputed, max(problem.least_recomputed, problem.most_recomputed), "k"
        ),
        redone=_redone(model, problem, edges),
        score=model.new_int_var(0, largest if problem.cutoff is None else problem.cutoff, "score"),
    )


def _redone(
    model: cp_model.CpModel, problem: StageProblem, edges: list[cp_model.IntVar]
) -> list[cp_model.LinearExpr]:
    if problem.most_recomputed == 0:
        return [model.new_constant(0)] * problem.num_stages
    return [model.new_int_var(0, problem.num_layers, f"redone_{s}") for s in range(len(edges) - 1)]


def _every_layer(model: cp_model.CpModel, problem: StageProblem, variables: _Variables) -> None:
    for length in variables.lengths:
        model.add(length >= 1)
    if problem.most_recomputed:
        for redone, length in zip(variables.redone, variables.lengths, strict=True):
            model.add_min_equality(redone, [variables.recomputed, length])


def _scores(model: cp_model.CpModel, problem: StageProblem, variables: _Variables) -> None:
    for s in range(problem.num_stages):
        layers = _stage_sum(model, problem, variables, s, problem.cost[s])
        redone = problem.redo_cost[s] * variables.redone[s]
        model.add(variables.score >= problem.base[s] + layers + redone)


def _memory(model: cp_model.CpModel, problem: StageProblem, variables: _Variables) -> None:
    for s in range(problem.num_stages):
        layers = _stage_sum(model, problem, variables, s, problem.holds[s])
        saved = problem.saved[s] * variables.redone[s]
        held = problem.held[s] + layers - saved
        model.add(held <= problem.capacity)
        if problem.most_recomputed and problem.brought_back[s]:
            keeps_some = model.new_bool_var(f"keeps_some_{s}")
            model.add(variables.redone[s] < variables.lengths[s]).only_enforce_if(keeps_some)
            all_again = held + problem.brought_back[s] <= problem.capacity
            model.add(all_again).only_enforce_if(keeps_some.negated())


def _new(model: cp_model.CpModel, problem: StageProblem, variables: _Variables) -> None:
    for number, split in enumerate(problem.excluded):
        differs: list[cp_model.IntVar] = []
        inner = list(accumulate(split))[:-1]
        for edge, value in zip(variables.edges[1:-1], inner, strict=True):
            differs.append(_differs(model, edge, value, f"new_{number}_{len(differs)}"))
        model.add_bool_or(differs)


def _differs(
    model: cp_model.CpModel, variable: cp_model.IntVar, value: int, name: str
) -> cp_model.IntVar:
    differs = model.new_bool_var(name)
    model.add(variable != value).only_enforce_if(differs)
    return differs


def _hint(model: cp_model.CpModel, problem: StageProblem, variables: _Variables) -> None:
    for edge, value in zip(
        variables.edges[1:-1], list(accumulate(problem.hint))[:-1], strict=False
    ):
        model.add_hint(edge, value)


def _stage_sum(
    model: cp_model.CpModel,
    problem: StageProblem,
    variables: _Variables,
    stage: int,
    per_kind: tuple[int, ...],
) -> cp_model.LinearExpr:
    """Return the sum of a stage's layers: a difference of prefix sums."""
    if len(set(per_kind)) == 1:
        return per_kind[0] * variables.lengths[stage]
    prefix = [0, *accumulate(per_kind[kind] for kind in problem.kind_of_layer)]
    at: list[cp_model.IntVar] = []
    for edge in (variables.edges[stage], variables.edges[stage + 1]):
        value = model.new_int_var(0, prefix[-1], f"prefix_{stage}_{len(at)}")
        model.add_element(edge, prefix, value)
        at.append(value)
    return at[1] - at[0]
