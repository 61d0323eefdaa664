"""The server's memory before the first round, and after rounds without replies or states."""

from __future__ import annotations

from dataclasses import replace

import torch

from fedkeel import tree
from fedkeel.method.checks import call, check_same_form, check_states, explain_errors
from fedkeel.method.compose import Plan
from fedkeel.method.context import ByPart, Population
from fedkeel.method.local_training import ClientTraining
from fedkeel.method.round_values import Server
from fedkeel.tree import Tree


def server_start(training: ClientTraining, population: Population) -> Server:
    """Return the server before the first round.

    Args:
        training: the method, and the model with its initial parameters.
        population: how many clients there are.
    """
    params = tree.clone(training.shared_params)
    memory = initial_memory(training.plan, params, population)
    averaged = training.network.buffers if training.buffers == "average" else {}
    return Server(params, tree.clone(averaged), memory)


def initial_memory(plan: Plan, params: Tree, population: Population) -> ByPart:
    """Return what the parts remember at the server before the first round."""
    optimiser = plan.server_optimiser
    with explain_errors("The server's memory cannot be initialised"):
        memory: ByPart = {
            part.name: call(part.init_server, params, population) for part in plan.server_states
        }
        memory[optimiser.name] = call(optimiser.init_optimiser, params, population)
    check_states("remembers at the server", memory)
    return memory


def initial_table_row(plan: Plan, params: Tree) -> ByPart:
    """Return the table rows of a client that has not taken part yet, by part."""
    with explain_errors("The server's memory of a client cannot be initialised"):
        rows = {part.name: call(part.init_row, params) for part in plan.tables}
    check_states("remembers of a client", rows)
    return rows


def states_without_replies(plan: Plan, server: Server) -> ByPart:
    """Return what the parts with a server state remember after a round without replies."""
    before = {part.name: server.memory[part.name] for part in plan.server_states}
    after = {p.name: call(p.next_without_replies, before[p.name]) for p in plan.server_states}
    check_same_form("remembers at the server", before, after)
    return after


def copy_memory(server: Server) -> Server:
    """Return the server with a copy of its memory, which parts may change in place."""
    memory = {part: tree.map_tensors(torch.clone, state) for part, state in server.memory.items()}
    return replace(server, memory=memory)


def reset_client_sums(plan: Plan, server: Server, population: Population) -> Server:
    """Return the server with the first memory of the parts that hold sums of client states.

    A client that has lost its state can no longer be taken out of such a sum.
    """
    initial = initial_memory(plan, server.params, population)
    reset = {part: state for part, state in initial.items() if part in plan.client_sum_parts}
    return replace(server, memory={**server.memory, **reset})
