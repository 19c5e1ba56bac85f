"""Compare what a lowered plan does with what the cost model says, without a cluster.

One rank of each role (`rank_roles`) is run. Per role: executed FLOPs and the bytes that each axis
carries must equal `costmodels.counts` exactly, the peak of live storage must lie within 5 % of
`costmodels.memory`. Across ranks: whoever shares a group must call the same collectives in the same
order, and every message sent must be received. Along a pipeline every pair of ranks must exchange
in the same order at both ends.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from costmodels.counts.ranks import count_rank
from costmodels.memory.estimate import estimate_memory
from costmodels.schedule import Action, ActionKind, ScheduleTable
from costmodels.units import GIB
from planner.plan import Plan
from runtime.any_module.modules import lowered_plan, module_of_plan
from runtime.dry_run.rank_roles import rank_roles
from runtime.dry_run.run import DryRuns, RankRun
from runtime.dry_run.trackers import Message
from runtime.lower import rows_of

PEAK_TOLERANCE = 0.05  # the contract's
_REPORTED_AS = {"tp": "tp", "cp": "cp", "pp": "pp", "ends": "pp", "ep": "ep", "etp": "ep"}
# The send that an action is one end of, and how far its sender's and receiver's stages are.
_EXCHANGES = {
    ActionKind.SEND_FORWARD: (ActionKind.SEND_FORWARD, 0, 1),
    ActionKind.RECV_FORWARD: (ActionKind.SEND_FORWARD, -1, 0),
    ActionKind.SEND_BACKWARD: (ActionKind.SEND_BACKWARD, 0, -1),
    ActionKind.RECV_BACKWARD: (ActionKind.SEND_BACKWARD, 1, 0),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """One figure from the graph and from the estimate."""

    graph: float
    estimate: float

    def agrees(self, tolerance: float = 0.0) -> bool:
        """Tell whether they differ by at most a share of the graph's."""
        return abs(self.graph - self.estimate) <= tolerance * abs(self.graph)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleReport:
    """One role's figures.

    Attributes:
        ranks: Global ranks of the role, ascending.
        num_bytes: By axis.
        live_peak: Bytes.

    """

    ranks: tuple[int, ...]
    flops: Pair
    num_bytes: tuple[tuple[str, Pair], ...]
    live_peak: Pair

    @property
    def agrees(self) -> bool:
        """Whether every figure lies within its tolerance."""
        exact = (self.flops, *(pair for _, pair in self.num_bytes))
        return all(pair.agrees() for pair in exact) and self.peak_agrees

    @property
    def peak_agrees(self) -> bool:
        """Whether the live peak lies within its tolerance."""
        return self.live_peak.agrees(PEAK_TOLERANCE)


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """All roles of a plan.

    Attributes:
        disagreements: What collectives do not match, in words; empty if all do.
        warnings: What the lowering could not do as the plan asks.

    """

    roles: tuple[RoleReport, ...]
    disagreements: tuple[str, ...]
    warnings: tuple[str, ...]

    @property
    def agrees(self) -> bool:
        """Whether the plan holds."""
        return not self.disagreements and all(role.agrees for role in self.roles)

    def to_json(self) -> dict[str, object]:
        """Return the contract's object."""
        return {
            "schema": 1,
            "roles": [_role_json(role) for role in self.roles],
            "collectives_agree": not self.disagreements,
            "disagreements": list(self.disagreements),
            "warnings": list(self.warnings),
        }


def verify(
    plan: Plan, module: str | None = None, *, progress: Callable[[str], None] | None = None
) -> VerifyReport:
    """Dry-run every role of a plan.

    Args:
        plan: What to run.
        module: `package.module:function` where the plan is of a traced module.
        progress: Is told in words what comes next.

    Raises:
        ValueError: The plan cannot be lowered: an unknown architecture, degrees that do not divide.

    """
    layout, tell = plan.layout, progress or _keep_silent
    tell(f"lowering {plan.model.name}")
    lowered = lowered_plan(plan, module_of_plan(plan, module))
    # A dry run gives all experts equal shares; the estimate's margin for uneven ones is left out.
    job = replace(plan.job, switches=replace(plan.job.switches, balanced_routing=True))
    memory = estimate_memory(plan.model, job, plan.cluster, layout)
    roles, runs = [], []
    dry = DryRuns(lowered, plan.job, layout)
    all_roles = rank_roles(plan.model, plan.job, layout)
    for number, role in enumerate(all_roles, 1):
        tell(f"role {number} of {len(all_roles)}: rank {role.ranks[0]}")
        place = role.stage_rank
        run = dry.run(role.ranks[0])
        counts = count_rank(plan.model, plan.job, layout, place)
        roles.append(
            RoleReport(
                ranks=role.ranks,
                flops=Pair(graph=run.flops, estimate=counts.flops),
                num_bytes=_pairs(bytes_by_axis(run), dict(counts.num_bytes)),
                live_peak=Pair(graph=run.peak, estimate=memory.per_rank[place].allocated),
            )
        )
        runs.append(run)
    return VerifyReport(
        roles=tuple(roles),
        disagreements=(*disagreements(runs), *crossed_messages(rows_of(layout))),
        warnings=lowered.meta["warnings"],
    )


def _keep_silent(words: str) -> None:
    del words


def bytes_by_axis(run: RankRun) -> dict[str, int]:
    """Return a rank's bytes by the contract's axes; what keeps states in step counts as "dp"."""
    total: Counter[str] = Counter()
    for axis, count in run.num_bytes.items():
        total[_REPORTED_AS.get(axis, "dp")] += count
    return dict(total)


def _pairs(graph: dict[str, int], estimate: dict[str, int]) -> tuple[tuple[str, Pair], ...]:
    axes = sorted({axis for axis, count in (graph | estimate).items() if count})
    return tuple(
        (axis, Pair(graph=graph.get(axis, 0), estimate=estimate.get(axis, 0))) for axis in axes
    )


# Agreement across ranks.


def disagreements(runs: Sequence[RankRun]) -> list[str]:
    """Return what would hang: members of a group that differ in order, messages of one end only."""
    return [*_differing_collectives(runs), *_lost_messages(runs)]


def _differing_collectives(runs: Sequence[RankRun]) -> Iterable[str]:
    seen: dict[tuple[int, ...], dict[int, list[tuple[str, int]]]] = defaultdict(dict)
    for run in runs:
        for message in run.messages:
            if message.peer < 0:
                calls = seen[message.ranks].setdefault(run.rank, [])
                calls.append((message.operation, message.num_bytes))
    known = {run.rank for run in runs}
    for ranks, calls_of in seen.items():
        present = [rank for rank in ranks if rank in known]
        first = calls_of.get(present[0], [])
        for rank in present[1:]:
            place = _first_difference(first, calls_of.get(rank, []))
            if place is not None:
                yield (
                    f"ranks {present[0]} and {rank} of group {format_ranks(ranks)} differ in "
                    f"collective {place}"
                )


def _first_difference(one: Sequence[object], other: Sequence[object]) -> int | None:
    for place, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return place
    return None if len(one) == len(other) else min(len(one), len(other))


def _lost_messages(runs: Sequence[RankRun]) -> Iterable[str]:
    """Compare, per pair of ranks, what is sent with what is received: tag and size."""
    known = {run.rank for run in runs}
    sent: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    received: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for run in runs:
        for message in run.messages:
            what = (message.tag, message.num_bytes)
            if message.operation == "send":
                sent[run.rank, message.peer].append(what)
            elif message.operation == "receive":
                received[_transfer(message, run.rank, known)].append(what)
    for pair in sorted(set(sent) | set(received)):
        if sorted(sent[pair]) != sorted(received[pair]):
            yield f"rank {pair[0]} sends other messages than rank {pair[1]} receives"


def crossed_messages(table: ScheduleTable) -> Iterable[str]:
    """Compare the order in which ranks of a pipeline exchange, both directions together.

    NCCL runs the messages of a pair of ranks in the order in which each end began them. The whole
    rows are compared, as ranks are run with different micro-batches of theirs
    (`dry_run/short_rows.py`).
    """
    ranks = table.shape.rank_of_stage
    order: dict[tuple[int, int], list[Action]] = defaultdict(list)
    for rank in range(len(table.rows)):
        for action in table.actions(rank):
            if action.kind in _EXCHANGES:
                kind, to_sender, to_receiver = _EXCHANGES[action.kind]
                peer = ranks[action.stage + to_sender + to_receiver]
                sent = Action(action.stage + to_sender, kind, action.micro_batch)
                order[rank, peer].append(sent)
    for one, other in sorted({(min(pair), max(pair)) for pair in order}):
        place = _first_difference(order[one, other], order[other, one])
        if place is not None:
            yield f"pipeline ranks {one} and {other} differ in message {place} of the pair"


def _transfer(message: Message, rank: int, known: set[int]) -> tuple[int, int]:
    """Return sender and receiver of a message that a rank receives.

    A sender that was not run does what this rank does, seen from its own place in the group: what
    comes from the rank before is what this one sends to the rank after.
    """
    if message.peer in known:
        return message.peer, rank
    ranks = message.ranks
    here = ranks.index(rank)
    return rank, ranks[(2 * here - ranks.index(message.peer)) % len(ranks)]


# Output.


def format_ranks(ranks: Sequence[int]) -> str:
    """Return "0-7,16": runs of neighbouring ranks."""
    runs: list[tuple[int, int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], rank)
        else:
            runs.append((rank, rank))
    return ",".join(f"{a}-{b}" if a != b else f"{a}" for a, b in runs)


def _role_json(role: RoleReport) -> dict[str, object]:
    return {
        "ranks": format_ranks(role.ranks),
        "flops": _pair_json(role.flops),
        "bytes": {axis: _pair_json(pair) for axis, pair in role.num_bytes},
        "live_peak_gib": {
            "graph": round(role.live_peak.graph / GIB, 4),
            "estimate": round(role.live_peak.estimate / GIB, 4),
        },
        "agrees": role.agrees,
    }


def _pair_json(pair: Pair) -> dict[str, float]:
    return {"graph": pair.graph, "estimate": pair.estimate}
