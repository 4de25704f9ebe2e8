"""The part of the suite's fixture that runs as tasks.

The SDK has no tasks of its own, so this is a middleware of its server: it sees
`tools/call` of the tools below and every `tasks/*` request before the SDK does,
and answers with plain JSON objects. Two protocols for one kind of job:

    2025-11-25   core tasks: the client asks for a task with `task` in the
                 parameters, waits in `tasks/result`, is asked in between;
    2026-07-28   the extension: the server decides, `tasks/get` has the result
                 or the questions, `tasks/update` brings the answers.
"""
import asyncio
import datetime
import secrets

import mcp_types as types
from mcp.shared.exceptions import MCPError

from suite_asking import (
    INVALID_PARAMS,
    META,
    MISSING_CAPABILITY,
    RESULT_TYPES,
    STRING,
    Call,
    MoreInput,
    Refused,
    call_of,
    form,
    is_modern,
    plain,
)

EXTENSION = META + "tasks"
RELATED = META + "related-task"
METHOD_NOT_FOUND = -32601
INTERNAL_ERROR = -32603

TTL_MS = 600_000
POLL_MS = 200
FINAL = ("completed", "failed", "cancelled")

LEGACY_CAPABILITY = types.ServerTasksCapability(
    list=types.TasksListCapability(),
    cancel=types.TasksCancelCapability(),
    requests=types.ServerTasksRequestsCapability(tools=types.TasksToolsCapability(call=types.TasksCallCapability())),
)


# ---------------------------------------------------------------------------
# Tools
# ---------------------------------------------------------------------------


class JobTool:
    """A tool that may run as a task.

    `job`: it does run as one for a client that can have tasks. `only`: other
    clients are refused. `asks_first`: it asks in the call itself, and what it
    returns then, the rest of its work, runs as a task.
    """

    def __init__(self, listed, function, job=True, only=False, asks_first=False):
        self.listed = listed
        self.function = function
        self.job = job
        self.only = only
        self.asks_first = asks_first


JOBS = {}


def job_tool(name, description, properties=None, required=(), **kind):
    def register(function):
        schema = {"type": "object", "properties": properties or {}, "required": list(required)}
        JOBS[name] = JobTool(types.Tool(name=name, description=description, input_schema=schema), function, **kind)
        return function

    return register


def text_result(value, **more):
    return dict({"content": [{"type": "text", "text": value}]}, **more)


@job_tool("greet", "Greets somebody at once", {"name": STRING}, ["name"], job=False)
async def greet(call):
    return text_result("Hello, %s!" % call.arguments["name"])


@job_tool("slow_compute", "Takes its time", {"seconds": {"type": "number"}, "label": STRING}, ["seconds"])
async def slow_compute(call):
    await asyncio.sleep(call.arguments["seconds"])
    return text_result("Computed %s" % call.arguments.get("label", "something"))


@job_tool("failing_job", "Works for a second and reports an error", only=True)
async def failing_job(_call):
    await asyncio.sleep(1)
    return text_result("This job intentionally fails", isError=True)


@job_tool("protocol_error_job", "Fails as a request, not as a tool")
async def protocol_error_job(_call):
    raise MCPError(INTERNAL_ERROR, "This job intentionally breaks")


@job_tool("confirm_delete", "Asks before it deletes", {"filename": STRING}, ["filename"])
async def confirm_delete(call):
    question = form("Delete %s?" % call.arguments["filename"], confirm={"type": "boolean"})
    answers = await call.ask(confirm=question)
    agreed = answers["confirm"].get("content", {}).get("confirm")
    return text_result("Deleted" if agreed else "Kept")


@job_tool("multi_input", "Asks two things at once")
async def multi_input(call):
    answers = await call.ask(first=form("Who?", name=STRING), second=form("Sure?", confirm={"type": "boolean"}))
    return text_result("%s and %s" % (answers["first"]["action"], answers["second"]["action"]))


@job_tool("test_tool_with_task", "Asks for a name, then works on", only=True, asks_first=True)
async def tool_with_task(call):
    answers = await call.ask(user_name=form("What is your name?", name=STRING))
    name = answers["user_name"].get("content", {}).get("name")

    async def work():
        await asyncio.sleep(0.3)
        return text_result("Worked for %s" % name)

    return work


def tools(legacy):
    """The listed tools; a legacy client learns which of them run as tasks."""
    if not legacy:
        return [tool.listed for tool in JOBS.values()]
    must = types.ToolExecution(task_support="required")
    return [tool.listed.model_copy(update={"execution": must}) if tool.job else tool.listed for tool in JOBS.values()]


# ---------------------------------------------------------------------------
# Tasks
# ---------------------------------------------------------------------------


def now():
    return datetime.datetime.now(datetime.timezone.utc).isoformat()


class Task:
    """A job that runs, what became of it, and what it waits for."""

    def __init__(self):
        self.id = secrets.token_urlsafe(18)
        self.status = "working"
        self.created = self.updated = now()
        self.result = None  # a tool result, once completed
        self.error = None  # a JSON-RPC error, once failed
        self.questions = {}  # key -> (request, future of the answer); gone once answered
        self.changed = asyncio.Event()  # set and replaced at every change
        self.running = None

    def start(self, work):
        self.running = asyncio.ensure_future(self._run(work))

    async def _run(self, work):
        try:
            self.result = await work()
            self._become("completed")
        except Refused as refusal:
            self.result = text_result(str(refusal), isError=True)
            self._become("completed")
        except MCPError as error:
            self.error = {"code": error.code, "message": error.message}
            self._become("failed")
        except Exception as error:  # a bug in a tool must not leave a task that never ends
            self.error = {"code": INTERNAL_ERROR, "message": str(error)}
            self._become("failed")

    def cancel(self):
        if self.status not in FINAL:
            self.running.cancel()
            self.questions.clear()
            self._become("cancelled")

    def _become(self, status):
        if self.status not in FINAL:
            self.status = status
        self.updated = now()
        self.changed.set()
        self.changed = asyncio.Event()

    async def ask(self, requests):
        """Wait until all of them are answered; called by the job itself."""
        futures = {}
        for name, request in requests.items():
            futures[name] = asyncio.get_running_loop().create_future()
            # A key never comes back within a task.
            self.questions["%s-%s" % (name, secrets.token_hex(4))] = (request, futures[name])
        self._become("input_required")
        answers = await asyncio.gather(*futures.values())
        return dict(zip(futures, answers))

    def answer(self, key, value):
        """Hand in an answer; unknown and answered keys are ignored."""
        _request, future = self.questions.pop(key, (None, None))
        if future is None or future.done():
            return
        if isinstance(value, Exception):
            future.set_exception(value)
        else:
            future.set_result(value)
        self._become("input_required" if self.questions else "working")


class TaskCall(Call):
    """A call that runs as a task: nobody to log to, and questions make it wait."""

    def __init__(self, ctx, arguments, task):
        super().__init__(ctx, arguments)
        self.task = task

    async def log(self, text):
        pass

    async def progress(self, done, total):
        pass

    async def ask(self, **requests):
        return await self.task.ask(requests)


tasks = {}  # id -> Task, for the life of the process


def find(params):
    task = tasks.get(params.get("taskId"))
    if task is None:
        raise MCPError(INVALID_PARAMS, "Unknown task: %s" % params.get("taskId"))
    return task


def start_task(work):
    """Run a coroutine function as a task."""
    task = Task()
    tasks[task.id] = task
    task.start(work)
    return task


def start_tool(ctx, tool, arguments):
    """Run a whole tool as a task: its questions are the task's."""

    async def work():
        outcome = await tool.function(TaskCall(ctx, arguments, task))
        return await outcome() if callable(outcome) else outcome

    task = start_task(work)
    return task


async def run_here(tool, call):
    """Run a tool to its end within its call."""
    try:
        outcome = await tool.function(call)
        return await outcome() if callable(outcome) else outcome
    except MoreInput as more:
        return plain(more.result)
    except Refused as refusal:
        return text_result(str(refusal), isError=True)


# ---------------------------------------------------------------------------
# 2025-11-25: core tasks
# ---------------------------------------------------------------------------


def legacy_task(task):
    return {
        "taskId": task.id,
        "status": "failed" if task.result and task.result.get("isError") else task.status,
        "createdAt": task.created,
        "lastUpdatedAt": task.updated,
        "ttl": TTL_MS,
        "pollInterval": POLL_MS,
    }


async def legacy_call(ctx, tool, params):
    if not tool.job:
        return await run_here(tool, call_of(ctx, None, params.get("arguments")))
    if "task" not in params:
        raise MCPError(METHOD_NOT_FOUND, "Tool %s runs as a task only" % tool.listed.name)
    return {"task": legacy_task(start_tool(ctx, tool, params.get("arguments")))}


async def legacy_get(_ctx, params):
    return legacy_task(find(params))


async def legacy_list(_ctx, _params):
    return {"tasks": [legacy_task(task) for task in tasks.values()]}


async def legacy_cancel(_ctx, params):
    task = find(params)
    if task.status in FINAL:
        raise MCPError(INVALID_PARAMS, "Task %s has ended" % task.id)
    task.cancel()
    return legacy_task(task)


async def legacy_result(ctx, params):
    """Wait for the end of a task; its questions are asked meanwhile."""
    task = find(params)
    asking = {}  # key -> the question under way
    while task.status not in FINAL:
        changed = task.changed
        for key, (request, _future) in task.questions.items():
            if key not in asking:
                asking[key] = asyncio.ensure_future(ask_for_task(ctx, task, key, request))
        await changed.wait()
    if task.error:
        raise MCPError(task.error["code"], task.error["message"])
    if task.status == "cancelled":
        raise MCPError(INVALID_PARAMS, "Task %s was cancelled" % task.id)
    return dict(task.result, _meta={RELATED: {"taskId": task.id}})


async def ask_for_task(ctx, task, key, request):
    message = plain(request)
    params = dict(message.get("params") or {}, _meta={RELATED: {"taskId": task.id}})
    channel = ctx.session._request_outbound  # the typed way has no place for _meta
    try:
        answer = await channel.send_raw_request(request.method, params)
        task.answer(key, plain(RESULT_TYPES[request.method].model_validate(answer)))
    except MCPError as error:
        task.answer(key, Refused("%s was refused: %s" % (request.method, error.message)))


# ---------------------------------------------------------------------------
# 2026-07-28: the extension
# ---------------------------------------------------------------------------


def modern_task(task):
    return {
        "taskId": task.id,
        "status": task.status,
        "createdAt": task.created,
        "lastUpdatedAt": task.updated,
        "ttlMs": TTL_MS,
        "pollIntervalMs": POLL_MS,
    }


def has_extension(ctx):
    meta = (ctx.params or {}).get("_meta") or {}
    capabilities = meta.get(META + "clientCapabilities") or {}
    return EXTENSION in (capabilities.get("extensions") or {})


def require_extension(ctx):
    if not has_extension(ctx):
        needed = {"extensions": {EXTENSION: {}}}
        raise MCPError(MISSING_CAPABILITY, "needs the tasks extension", data={"requiredCapabilities": needed})


async def modern_call(ctx, tool, params):
    if tool.only:
        require_extension(ctx)
    typed = types.CallToolRequestParams.model_validate(params)
    call = call_of(ctx, typed, typed.arguments)
    if not tool.job or not has_extension(ctx):
        return complete(await run_here(tool, call))
    if not tool.asks_first:
        return dict(modern_task(start_tool(ctx, tool, typed.arguments)), resultType="task")
    try:
        work = await tool.function(call)
    except MoreInput as more:
        return plain(more.result)
    return dict(modern_task(start_task(work)), resultType="task")


def complete(result):
    return dict({"resultType": "complete"}, **result)


async def modern_get(ctx, params):
    require_extension(ctx)
    task = find(params)
    more = {}
    if task.status == "completed":
        more["result"] = complete(task.result)
    elif task.status == "failed":
        more["error"] = task.error
    elif task.status == "input_required":
        more["inputRequests"] = {key: plain(request) for key, (request, _future) in task.questions.items()}
    return complete(dict(modern_task(task), **more))


async def modern_update(ctx, params):
    require_extension(ctx)
    task = find(params)
    for key, value in (params.get("inputResponses") or {}).items():
        if not isinstance(value, dict):
            raise MCPError(INVALID_PARAMS, "inputResponses.%s is not an object" % key)
        task.answer(key, value)
    return complete({})


async def modern_cancel(ctx, params):
    require_extension(ctx)
    find(params).cancel()
    return complete({})


# ---------------------------------------------------------------------------
# The middleware
# ---------------------------------------------------------------------------

LEGACY = {
    "tasks/get": legacy_get,
    "tasks/list": legacy_list,
    "tasks/result": legacy_result,
    "tasks/cancel": legacy_cancel,
}
MODERN = {"tasks/get": modern_get, "tasks/update": modern_update, "tasks/cancel": modern_cancel}


async def middleware(ctx, call_next):
    if ctx.request_id is None or ctx.params is None:
        return await call_next(ctx)
    modern = is_modern(ctx)
    params = dict(ctx.params)
    if ctx.method == "tools/call" and params.get("name") in JOBS:
        answer = await (modern_call if modern else legacy_call)(ctx, JOBS[params["name"]], params)
    elif ctx.method in (MODERN if modern else LEGACY):
        answer = await (MODERN if modern else LEGACY)[ctx.method](ctx, params)
    else:
        return await call_next(ctx)
    return stamped(answer) if modern else answer


def stamped(answer):
    """Say who answers, as the SDK does for what it serves itself."""
    meta = dict(answer.get("_meta") or {})
    meta.setdefault(META + "serverInfo", identity)
    return dict(answer, _meta=meta)


identity = {}


def install(server):
    """Add the tools' protocol to a server; its list handler adds the tools."""
    server.extensions[EXTENSION] = {}
    server.middleware.append(middleware)
    identity.update(server.server_info_stamp)
