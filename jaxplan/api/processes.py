"""Several processes, one plan: the first process of the mesh searches, all others take over its plan.

Every process of the mesh traces the step by itself, and all compare what they traced before anything is searched:
processes that run different programs would wait for each other for ever in the first collective.  The first one
plans, the others wait; then all compare a hash of the plan that they hold.

What is said goes through the key-value store of `jax.distributed`'s coordination service: a collective would make
devices wait as long as the search takes, and Gloo's and NCCL's give up before that.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from .. import errors
from .._jax import coordination_client
from ..errors import JaxplanError, PlanMismatchError
from ..ir import Traced
from ..plans import Plan, plan_of_text, plan_text
from .meshes import Target

ARRIVAL_S = 600.0
"""Wait for the other processes to come to the same planning: twice what `jax.distributed.initialize` gives them to
start (its `initialization_timeout`, 300 s)."""

_SLICE_MS = 2000
"""Of one wait in the store, which Ctrl-C can't interrupt."""

_CHUNK_BYTES = 1 << 20
"""Of one value in the store: gRPC refuses messages over 4 MiB by default."""


def processes_of(mesh: Any) -> tuple[int, ...]:
    """Indices of the processes that a mesh has devices of, ascending; of an AbstractMesh none."""
    return tuple(sorted({d.process_index for d in mesh.devices.flat})) if isinstance(mesh, Mesh) else ()


def agreed_plan(
    traced: Traced, target: Target, settings: Mapping[str, str], make: Callable[[], Plan],
    mesh_for: Callable[[Plan], Any] | None = None,
) -> Plan:  # fmt: skip
    """`make()`, or on all processes but the first of the mesh the plan that the first one made.

    A mesh of one process, or one that this process has no device of, is planned for here alone; so is a compile-only
    mesh of several hosts where there is one process.

    Args:
      settings: what else the plan depends on, in words that are the same in every process.
      mesh_for: the mesh of a plan over the devices of `target`'s; None: the target's own.

    Raises:
      PlanMismatchError: the processes traced different programs, were given different settings, do not come to plan,
        or hold different plans in the end; on all of them.
      Any JaxplanError of `make`, on all of them.
    """
    processes, me = processes_of(target.mesh), jax.process_index()
    if len(processes) < 2 or me not in processes or jax.process_count() < 2:
        return make()
    board = _Board(target.mesh, processes, me)
    board.compare(_subject(traced, target, settings), traced.name)
    if me == processes[0]:
        try:
            plan = make()
        except BaseException as error:
            board.say("plan", {"error": type(error).__name__, "message": str(error)})
            raise
        board.say("plan", {"text": plan_text(plan)})
    else:
        plan = _received(board.hear("plan", processes[0], None), processes[0])
        mesh = target.mesh if mesh_for is None else mesh_for(plan)
        plan = plan.bind_leaves(traced.inputs, traced.outputs, traced.in_tree, traced.out_tree, mesh)
    board.compare({"plan": plan_digest(plan)}, traced.name)
    return plan


def plan_digest(plan: Plan) -> str:
    """A hash of all that a plan's file says."""
    return _digest(plan_text(plan))


def _subject(traced: Traced, target: Target, settings: Mapping[str, str]) -> dict[str, str]:
    leaves = [f"{leaf.path}: {leaf.dtype}{list(leaf.shape)}" for leaf in traced.inputs]
    return {
        "step": traced.name,
        "jax": jax.__version__,
        "mesh": ", ".join(f"{name}={size}" for name, size in target.axes),
        "hardware": target.profile.name,
        **settings,
        "arguments": f"{len(leaves)} leaves, {_digest(chr(10).join(leaves))}",
        "program": traced.fingerprint,
    }


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _received(answer: Mapping[str, str], leader: int) -> Plan:
    if "text" in answer:
        return plan_of_text(answer["text"], f"the plan of process {leader}")
    kind = getattr(errors, answer["error"], None)
    if isinstance(kind, type) and issubclass(kind, JaxplanError):
        raise kind(f"on process {leader}, which plans for all: {answer['message']}")
    raise JaxplanError(
        f"process {leader}, which plans for all, failed: {answer['error']}: {answer['message']}"
    )


class _Board:
    """What the processes of one mesh tell each other in one planning: a value a topic and process, said once.

    Plannings are numbered by a counter of each process in the store: the n-th of one process is the n-th of all.
    """

    def __init__(self, mesh: Mesh, processes: Sequence[int], me: int) -> None:
        self._client = coordination_client()
        if self._client is None:
            raise PlanMismatchError(
                f"the mesh has devices of processes {list(processes)}, and jax.distributed.initialize was not "
                "called in this one: call it first in every process"
            )
        self._processes, self._me, self._topics = processes, me, 0
        group = "jaxplan/" + _digest(",".join(str(device.id) for device in mesh.devices.flat))
        self._number = self._client.key_value_increment(f"{group}/plannings/{me}", 1)
        self._prefix = f"{group}/{self._number}"

    def say(self, topic: str, value: Mapping[str, str]) -> None:
        """Tell all processes a value under a topic."""
        packed = zlib.compress(json.dumps(value).encode())
        pieces = [packed[i : i + _CHUNK_BYTES] for i in range(0, len(packed), _CHUNK_BYTES)]
        for i, piece in enumerate(pieces):
            self._client.key_value_set_bytes(f"{self._prefix}/{topic}/{self._me}/{i}", piece)
        self._client.key_value_set_bytes(f"{self._prefix}/{topic}/{self._me}", str(len(pieces)).encode())

    def hear(self, topic: str, process: int, patience_s: float | None) -> dict[str, str]:
        """What `process` says under a topic; waits for it, for ever where `patience_s` is None."""
        count = int(self._get(f"{self._prefix}/{topic}/{process}", process, patience_s))
        pieces = [
            self._get(f"{self._prefix}/{topic}/{process}/{i}", process, patience_s) for i in range(count)
        ]
        return json.loads(zlib.decompress(b"".join(pieces)))

    def compare(self, mine: Mapping[str, str], name: str) -> None:
        """All processes say `mine`; PlanMismatchError on each of them unless all say the same."""
        self._topics += 1
        topic = f"compared{self._topics}"
        self.say(topic, mine)
        said = {process: self.hear(topic, process, ARRIVAL_S) for process in self._processes}
        lines = []
        for key in dict.fromkeys(key for one in said.values() for key in one):
            values = {process: one.get(key, "not said") for process, one in said.items()}
            if len(set(values.values())) > 1:
                lines.append(f"  {key}: " + "; ".join(f"process {p}: {text}" for p, text in values.items()))
        if lines:
            raise PlanMismatchError(
                f"the processes do not plan the same `{name}` (planning {self._number} on this mesh):\n"
                + "\n".join(lines)
                + "\nEvery process must call the same step, with arguments of the same shapes and the same settings, "
                "in the same order. Constants captured by the step count as its program: give each process the same."
            )

    def _get(self, key: str, process: int, patience_s: float | None) -> bytes:
        waited_ms = 0
        while True:
            try:
                return self._client.blocking_key_value_get_bytes(key, _SLICE_MS)
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise
            waited_ms += _SLICE_MS
            if patience_s is not None and waited_ms > 1e3 * patience_s:
                raise PlanMismatchError(
                    f"process {process} did not come to planning {self._number} on this mesh within "
                    f"{patience_s:.0f} s: every process that has devices of the mesh must call the step, in the same "
                    "order"
                )
