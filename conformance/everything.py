"""What to ask of the reference server "everything", and what to ignore in its answers.

A plan is a list of steps, each a JSON object:

    {"method": M, "params": P}           a request; "progress": true asks for progress
    {"method": "tools/call", "task": P}  the tool run as a task, followed to its end
    {"wait": M, "seconds": S}            wait until a message with method M has come
                                         in since the step before began

Every listed tool, prompt, resource, template and completable argument must have
a row here: a new release of the server with something new fails the check until
somebody decides what to do with it.
"""
from place import expect

TINY_FILE = "data:text/plain;base64,bWNweCBjb25mb3JtYW5jZQ=="

# Tool -> the argument sets it is called with.
TOOL_ARGUMENTS = {
    "echo": [{"message": "grüße, 世界"}],
    "get-annotated-message": [
        {"messageType": "error", "includeImage": True},
        {"messageType": "success"},
        {"messageType": "debug"},
    ],
    "get-env": [{}],
    "get-resource-links": [{"count": 4}],
    "get-resource-reference": [{"resourceType": "Text", "resourceId": 3}, {"resourceType": "Blob", "resourceId": 2}],
    "get-structured-content": [{"location": "Chicago"}],
    "get-sum": [{"a": 2, "b": 40}],
    "get-tiny-image": [{}],
    "get-roots-list": [{}],
    "gzip-file-as-resource": [
        {"name": "a.gz", "data": TINY_FILE, "outputType": "resource"},
        {"name": "b.gz", "data": TINY_FILE, "outputType": "resourceLink"},
    ],
    "trigger-elicitation-request": [{}],
    "trigger-url-elicitation": [
        {"url": "https://example.test/a", "message": "open", "elicitationId": "e-1"},
        {"url": "https://example.test/b", "elicitationId": "e-2", "errorPath": True},
    ],
    "trigger-sampling-request": [{"prompt": "hello", "maxTokens": 20}],
    "trigger-long-running-operation": [{"duration": 0.6, "steps": 3}],
    "trigger-sampling-request-async": [{"prompt": "later", "maxTokens": 20}],
    "trigger-elicitation-request-async": [{}],
    # Must be called as a task: directly a plain call is refused, and mcpx makes
    # a task of it, so the two cannot be equal. The plan calls it as a task.
    "simulate-research-query": [],
    "toggle-simulated-logging": [{}],
    "toggle-subscriber-updates": [{}],
}

# Called in pairs around a wait by the steps below, not one by one.
TOGGLES = ("toggle-simulated-logging", "toggle-subscriber-updates")

PROMPT_ARGUMENTS = {
    "simple-prompt": [None],
    "args-prompt": [{"city": "Kyiv", "state": "Kyiv City"}, {"city": "Lima"}],
    "completable-prompt": [{"department": "Sales", "name": "Eve"}],
    "resource-prompt": [
        {"resourceType": "Text", "resourceId": "1"},
        {"resourceType": "Blob", "resourceId": "2"},
        {"resourceType": "Neither", "resourceId": "2"},  # an error of the prompt
    ],
}

TEMPLATE_URIS = {
    "demo://resource/dynamic/text/{resourceId}": "demo://resource/dynamic/text/7",
    "demo://resource/dynamic/blob/{resourceId}": "demo://resource/dynamic/blob/8",
}

# (reference, argument, value, context)
COMPLETIONS = [
    ({"type": "ref/prompt", "name": "completable-prompt"}, "department", "", None),
    ({"type": "ref/prompt", "name": "completable-prompt"}, "name", "", {"department": "Support"}),
    ({"type": "ref/prompt", "name": "resource-prompt"}, "resourceType", "T", None),
    ({"type": "ref/prompt", "name": "resource-prompt"}, "resourceId", "5", None),
    ({"type": "ref/resource", "uri": "demo://resource/dynamic/text/{resourceId}"}, "resourceId", "9", None),
    ({"type": "ref/resource", "uri": "demo://resource/dynamic/blob/{resourceId}"}, "resourceId", "x", None),
]

LISTS = ("tools/list", "prompts/list", "resources/list", "resources/templates/list")

LIST_STEPS = [{"method": method, "params": {}} for method in LISTS]


def listed(results):
    """The four lists out of the results of LIST_STEPS."""
    keys = ("tools", "prompts", "resources", "resourceTemplates")
    return {key: result[key] for key, result in zip(keys, results)}


def undecided(lists):
    """Names that the server lists and no table above mentions."""
    known = (TOOL_ARGUMENTS, PROMPT_ARGUMENTS, TEMPLATE_URIS)
    names = (
        [tool["name"] for tool in lists["tools"]],
        [prompt["name"] for prompt in lists["prompts"]],
        [template["uriTemplate"] for template in lists["resourceTemplates"]],
    )
    return [name for found, table in zip(names, known) for name in found if name not in table]


def call(name, arguments, **more):
    return dict({"method": "tools/call", "params": {"name": name, "arguments": arguments}}, **more)


def plan(lists, tasks=True, slow=True):
    """Everything that can be asked of the server, given its lists.

    `tasks`: this host knows the tasks of 2025-11-25. `slow`: also what takes
    seconds because the server sleeps (tasks, and asking the host as a task).
    """
    missing = undecided(lists)
    expect(not missing, "the reference server has something new, decide what to ask of it: %s", missing)
    steps = list(LIST_STEPS) + [{"method": "ping"}, {"method": "logging/setLevel", "params": {"level": "debug"}}]
    steps += _tool_steps([tool["name"] for tool in lists["tools"]], slow)
    steps += _prompt_and_resource_steps(lists)
    steps += _change_steps()
    if tasks:
        steps += _task_steps(slow)
    return steps + _error_steps()


def _tool_steps(names, slow):
    steps = []
    for name in names:
        if name in TOGGLES or (name.endswith("-async") and not slow):
            continue
        for arguments in TOOL_ARGUMENTS[name]:
            steps.append(call(name, arguments, progress=name == "trigger-long-running-operation"))
    return steps


def _prompt_and_resource_steps(lists):
    steps = []
    for prompt in lists["prompts"]:
        for arguments in PROMPT_ARGUMENTS[prompt["name"]]:
            params = {"name": prompt["name"]}
            if arguments is not None:
                params["arguments"] = arguments
            steps.append({"method": "prompts/get", "params": params})
    uris = [resource["uri"] for resource in lists["resources"]]
    uris += [TEMPLATE_URIS[template["uriTemplate"]] for template in lists["resourceTemplates"]]
    steps += [{"method": "resources/read", "params": {"uri": uri}} for uri in uris]
    for reference, name, value, context in COMPLETIONS:
        params = {"ref": reference, "argument": {"name": name, "value": value}}
        if context:
            params["context"] = {"arguments": context}
        steps.append({"method": "completion/complete", "params": params})
    return steps


def _change_steps():
    """What the server says by itself: updates, log messages, changed lists."""
    uri = {"uri": "demo://resource/dynamic/text/1"}
    return [
        {"method": "resources/subscribe", "params": uri},
        call("toggle-subscriber-updates", {}),
        {"wait": "notifications/resources/updated", "seconds": 8},
        call("toggle-subscriber-updates", {}),
        {"method": "resources/unsubscribe", "params": uri},
        {"wait": "notifications/message", "seconds": 8},
        call("toggle-simulated-logging", {}),
        {"wait": "notifications/message", "seconds": 8},
        call("toggle-simulated-logging", {}),
        call("gzip-file-as-resource", {"name": "c.gz", "data": TINY_FILE}),
        {"wait": "notifications/resources/list_changed", "seconds": 8},
        {"method": "resources/list", "params": {}},
        {"method": "resources/read", "params": {"uri": "demo://resource/session/c.gz"}},
    ]


def _task_steps(slow):
    quick = [{"method": "tasks/list", "params": {}}, {"method": "tasks/get", "params": {"taskId": "no-such-task"}}]
    cancelled = {"method": "tools/call", "task": {"name": "simulate-research-query", "arguments": {"topic": "tides"}}}
    steps = quick + [dict(cancelled, cancel=True)]
    if slow:
        steps.append({"method": "tools/call", "task": dict(cancelled["task"])})
        ambiguous = {"topic": "python", "ambiguous": True}
        steps.append({"method": "tools/call", "task": {"name": "simulate-research-query", "arguments": ambiguous}})
        steps.append(quick[0])
    return steps


def _error_steps():
    return [
        call("no-such-tool", {}),
        call("get-sum", {"a": "not a number"}),
        {"method": "prompts/get", "params": {"name": "no-such-prompt"}},
        {"method": "prompts/get", "params": {"name": "args-prompt", "arguments": {}}},
        {"method": "resources/read", "params": {"uri": "demo://resource/nowhere"}},
        {
            "method": "completion/complete",
            "params": {
                "ref": {"type": "ref/prompt", "name": "no-such-prompt"},
                "argument": {"name": "x", "value": ""},
            },
        },
    ]
