"""The official Python SDK 1.x as a host, run in its own virtual environment.

usage: python sdk1_client.py < PLAN.json > TRANSCRIPT.json

PLAN: {"server": {"command", "args", "env", "cwd"}, "abilities": bool, "steps": [...]}
      with the steps that everything.py describes. With abilities the host offers
      roots, sampling, elicitation and tasks; without, nothing.
TRANSCRIPT: {"initialize": result, "steps": [{"result" or "error", "heard": [...]}], "closed": bool}
      heard: each message that came in during the step, as it was on the wire.
"""
import asyncio
import json
import sys
import warnings
from contextlib import asynccontextmanager
from datetime import timedelta

import anyio
import mcp.types as types
from mcp import ClientSession, McpError, StdioServerParameters
from mcp.client.experimental.task_handlers import ExperimentalTaskHandlers
from mcp.client.stdio import stdio_client
from pydantic import AnyUrl

# Tasks are called experimental there, with a warning at each use.
warnings.simplefilter("ignore", DeprecationWarning)

STEP_LIMIT_S = 60
TASK_ID = "host-task-1"
NOW = "2025-01-01T00:00:00Z"

FORM = {"name": "Ada", "check": True, "integer": 7, "number": 1.5, "interpretation": "snake", "agreeToTerms": True}


# ---------------------------------------------------------------------------
# What this host answers when the server asks
# ---------------------------------------------------------------------------


async def on_roots(_context):
    return types.ListRootsResult(roots=[types.Root(uri="file:///project/one", name="one")])


async def on_sampling(_context, _params):
    return types.CreateMessageResult(
        role="assistant", model="scripted", stopReason="endTurn", content=types.TextContent(type="text", text="sampled")
    )


async def on_elicitation(_context, params):
    if getattr(params, "mode", "form") == "url":
        return types.ElicitResult(action="accept")
    fields = params.requestedSchema["properties"]
    return types.ElicitResult(action="accept", content={key: FORM[key] for key in fields if key in FORM})


def host_task(status):
    return dict(taskId=TASK_ID, status=status, createdAt=NOW, lastUpdatedAt=NOW, ttl=60000, pollInterval=100)


class HostTasks:
    """Runs one question of the server as a task: done at the first look."""

    def __init__(self):
        self.result = None

    async def sampling(self, context, params, _metadata):
        self.result = await on_sampling(context, params)
        return types.CreateTaskResult(task=types.Task(**host_task("working")))

    async def elicitation(self, context, params, _metadata):
        self.result = await on_elicitation(context, params)
        return types.CreateTaskResult(task=types.Task(**host_task("working")))

    async def get(self, _context, _params):
        return types.GetTaskResult(**host_task("completed"))

    async def get_result(self, _context, _params):
        return types.GetTaskPayloadResult(**self.result.model_dump(by_alias=True, exclude_none=True))

    def handlers(self):
        return ExperimentalTaskHandlers(
            get_task=self.get,
            get_task_result=self.get_result,
            augmented_sampling=self.sampling,
            augmented_elicitation=self.elicitation,
        )


# ---------------------------------------------------------------------------
# The wire, with an ear on it
# ---------------------------------------------------------------------------


@asynccontextmanager
async def overheard(parameters, heard):
    """The SDK's stdio transport; each message that comes in is noted in `heard`."""
    async with stdio_client(parameters) as (source, write):
        sink, read = anyio.create_memory_object_stream(0)

        async def listen():
            async with sink:
                async for item in source:
                    if not isinstance(item, Exception):
                        message = item.message.model_dump(by_alias=True, exclude_unset=True, mode="json")
                        heard.append(message)
                    await sink.send(item)

        async with anyio.create_task_group() as group:
            group.start_soon(listen)
            yield read, write
            group.cancel_scope.cancel()


# ---------------------------------------------------------------------------
# The steps
# ---------------------------------------------------------------------------


async def ignore_progress(_progress, _total, _message):
    """Asking for progress is what matters; the ear hears it."""


def shown(result):
    return result.model_dump(by_alias=True, exclude_none=True, mode="json")


def reference(ref):
    kind = types.PromptReference if ref["type"] == "ref/prompt" else types.ResourceTemplateReference
    return kind(**ref)


REQUESTS = {
    "ping": lambda s, p: s.send_ping(),
    "logging/setLevel": lambda s, p: s.set_logging_level(p["level"]),
    "tools/list": lambda s, p: s.list_tools(),
    "prompts/list": lambda s, p: s.list_prompts(),
    "resources/list": lambda s, p: s.list_resources(),
    "resources/templates/list": lambda s, p: s.list_resource_templates(),
    "prompts/get": lambda s, p: s.get_prompt(p["name"], p.get("arguments")),
    "resources/read": lambda s, p: s.read_resource(AnyUrl(p["uri"])),
    "resources/subscribe": lambda s, p: s.subscribe_resource(AnyUrl(p["uri"])),
    "resources/unsubscribe": lambda s, p: s.unsubscribe_resource(AnyUrl(p["uri"])),
    "completion/complete": lambda s, p: s.complete(
        reference(p["ref"]), p["argument"], (p.get("context") or {}).get("arguments")
    ),
    "tasks/list": lambda s, p: s.experimental.list_tasks(),
    "tasks/get": lambda s, p: s.experimental.get_task(p["taskId"]),
}


async def call_tool(session, step):
    params = step["params"]
    callback = ignore_progress if step.get("progress") else None
    return await session.call_tool(params["name"], params["arguments"], progress_callback=callback)


async def run_task(session, step):
    """Run a tool as a task: follow it to its end, or cancel it at once."""
    tasks = session.experimental
    created = await tasks.call_tool_as_task(step["task"]["name"], step["task"]["arguments"])
    task_id = created.task.taskId
    if step.get("cancel"):
        cancelled = await tasks.cancel_task(task_id)
        return {"created": shown(created), "cancelled": shown(cancelled), "now": shown(await tasks.get_task(task_id))}
    # tasks/result waits for the end, and is how the server asks in between.
    result = await tasks.get_task_result(task_id, types.CallToolResult)
    return {"created": shown(created), "now": shown(await tasks.get_task(task_id)), "result": shown(result)}


async def wait_for(heard, since, step):
    """Whether a message with the method has come in since an index, in time."""
    deadline = asyncio.get_running_loop().time() + step["seconds"]
    while asyncio.get_running_loop().time() < deadline:
        if any(message.get("method") == step["wait"] for message in heard[since:]):
            return {"came": True}
        await asyncio.sleep(0.02)
    return {"came": False}


async def perform(session, heard, since, step):
    if "wait" in step:
        return await wait_for(heard, since, step)
    if "task" in step:
        return await run_task(session, step)
    if step["method"] == "tools/call":
        return shown(await call_tool(session, step))
    return shown(await REQUESTS[step["method"]](session, step.get("params")))


async def attempt(session, heard, since, step):
    """The record of one step, whatever happened."""
    start = len(heard)
    try:
        record = {"result": await asyncio.wait_for(perform(session, heard, since, step), STEP_LIMIT_S)}
    except McpError as error:
        record = {"error": error.error.model_dump(exclude_none=True)}
    except asyncio.TimeoutError:
        record = {"error": {"message": "no answer within %d s" % STEP_LIMIT_S}}
    except Exception as error:  # the SDK's own verdict on a result, for instance
        record = {"error": {"message": "%s: %s" % (type(error).__name__, error)}}
    record["heard"] = [message for message in heard[start:] if "method" in message]
    return record


async def main(plan):
    heard = []
    parameters = StdioServerParameters(**plan["server"])
    callbacks = {}
    if plan["abilities"]:
        callbacks = {
            "list_roots_callback": on_roots,
            "sampling_callback": on_sampling,
            "elicitation_callback": on_elicitation,
            "experimental_task_handlers": HostTasks().handlers(),
        }
    records = []
    async with overheard(parameters, heard) as (read, write):
        async with ClientSession(read, write, read_timeout_seconds=timedelta(seconds=90), **callbacks) as session:
            greeting = shown(await session.initialize())
            before = 0
            for step in plan["steps"]:
                start = len(heard)
                records.append(await attempt(session, heard, before, step))
                before = start
    return {"initialize": greeting, "steps": records, "all": [m for m in heard if "method" in m]}


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main(json.load(sys.stdin)))))
