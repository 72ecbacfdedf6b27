"""Runs of agents that mend repositories: SWE-agent, SWE-smith, OpenHands."""

from typing import Any

from pipelines.sources.columns import list_of, looks_listed, optional_text, tools_of
from pipelines.sources.row import Given, Json, Refused, kind_of

_OF_A_RUN = ("instance_id", "traj_id", "trajectory_id")


def recognises(row: Json) -> bool:
    """By `trajectory`, or by `messages` beside the id of a run."""
    return looks_listed(row.get("trajectory")) or (
        looks_listed(row.get("messages")) and any(key in row for key in _OF_A_RUN)
    )


def read(row: Json) -> Given:
    """`messages`, or else `trajectory`, of which there are three kinds.

    * nebius/SWE-agent-trajectories: role (system, user, ai) and text; `system_prompt` of a system.
    * nebius/SWE-rebench-openhands-trajectories, nvidia's: messages in OpenAI's words.
    * SWE-agent's own files: steps of thought, action and observation. The `query` of the first step
      or the `problem_statement` of the row opens them, and an observation comes from the user.

    Of SWE-bench/SWE-smith-trajectories, a result's only one of `tool_call_ids` is its id.
    """
    column = "trajectory" if row.get("messages") is None else "messages"
    turns = list_of(row, column)
    for index, turn in enumerate(turns):
        if not isinstance(turn, dict) or ("role" in turn) != ("role" in turns[0]):
            seen = sorted(turn) if isinstance(turn, dict) else f"a {kind_of(turn)}"
            raise Refused("wrong_format", f"{column} {index} is {seen}, expected a turn or a step")
    is_talk = not turns or "role" in turns[0]
    messages = [_message(turn) for turn in turns] if is_talk else _steps(row, turns)
    return Given(messages, tools_of(row))


def _message(turn: Json) -> Json:
    if turn["role"] == "ai" or "text" in turn or "system_prompt" in turn:
        role = "assistant" if turn["role"] == "ai" else turn["role"]
        said = turn.get("system_prompt") if turn.get("text") is None else turn["text"]
        return {"role": role, "content": said}
    match turn.get("tool_call_ids"):
        case [call_id] if turn.get("tool_call_id") is None:
            return {**turn, "tool_call_id": call_id}
        case _:
            return turn


def _steps(row: Json, steps: list[Json]) -> list[Any]:
    messages = _opening(row, steps[0])
    for index, step in enumerate(steps):
        answer = optional_text(step, "response")
        if answer is None:
            thought, action = optional_text(step, "thought"), optional_text(step, "action")
            if action is None:
                raise Refused("wrong_format", f"step {index} has neither response nor action")
            answer = f"{thought or ''}\n```\n{action.strip()}\n```".lstrip()
        messages.append({"role": "assistant", "content": answer})
        seen = optional_text(step, "observation")
        if seen is not None:
            messages.append({"role": "user", "content": seen})
    return messages


def _opening(row: Json, first: Json) -> list[Any]:
    if first.get("query") is not None:
        return [*list_of(first, "query")]
    problem = optional_text(row, "problem_statement")
    if problem is None:
        raise Refused("wrong_format", "no query and no problem_statement opens the steps")
    return [{"role": "user", "content": problem}]
