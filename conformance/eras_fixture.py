#!/usr/bin/env python3
"""A server on the official SDK that offers every feature, in the era that its client begins with.

The same tools, prompts and resources in both eras, so that what a client meets
differs only where the revisions do. Over stdio the SDK serves one era on one
pipe: the first message locks it.

    eras_fixture.py                 whatever the first message says
    eras_fixture.py --era legacy    refuses the other era, which shows
    eras_fixture.py --era modern    that a check spoke to the era it meant
"""
import argparse
import asyncio
import json
import sys
import warnings

import mcp_types as types
from mcp.server.caching import CacheHint
from mcp.server.lowlevel.server import NotificationOptions, Server
from mcp.server.subscriptions import (
    InMemorySubscriptionBus,
    ListenHandler,
    PromptsListChanged,
    ResourcesListChanged,
    ResourceUpdated,
    ToolsListChanged,
)
from mcp.shared.exceptions import MCPDeprecationWarning, MCPError

from suite_asking import INVALID_PARAMS, META, STRING, MoreInput, Refused, call_of, form, is_modern, roots, sampling
from suite_fixture import RESOURCE_NOT_FOUND, embedded, encoded, png, result, serve_stdio, text, wav

# Clients are asked about what the newest revision has deprecated.
warnings.simplefilter("ignore", MCPDeprecationWarning)

URL_REQUIRED = -32042  # 2025-11-25 only
PAGE_SIZE = 7
# After progress: a client forgets who waits for it when the answer is there, and some are slow to tell.
PAUSE_S = 0.05
# How long a tool that is to be cancelled works, and how long its client may take to have it ended.
WORK_S = 30
CANCEL_LIMIT_S = 5

LEVELS = ("debug", "info", "notice", "warning", "error", "critical", "alert", "emergency")

KEPT = {"example.test/kept": {"deep": [1, None]}}
ICONS = [types.Icon(src="https://example.test/icon.png", mime_type="image/png", sizes=["48x48"], theme="dark")]
NOTES = types.Annotations(audience=["user", "assistant"], priority=0.5, last_modified="2025-01-12T15:00:58Z")
PAGE = "https://example.test/pay"

bus = InMemorySubscriptionBus()


class State:
    """What happened in this process so far."""

    def __init__(self):
        self.level = "info"  # what a legacy client wants logged
        self.watched = set()  # uris that a legacy client has subscribed to
        self.added = {"tools": 0, "prompts": 0, "resources": 0}
        self.cancelled = asyncio.Event()
        self.page_opened = False


state = State()


# ---------------------------------------------------------------------------
# Tools
# ---------------------------------------------------------------------------

TOOLS = {}  # name -> (types.Tool, function of a call)


def tool(name, output=None, required=None, hints=None, **properties):
    """Register a tool; its properties are required unless `required` says which."""

    def register(function):
        wanted = list(properties) if required is None else required
        shape = {"type": "object", "properties": properties, "required": wanted}
        listed = types.Tool(
            name=name,
            title=name.replace("_", " ").capitalize(),
            description=function.__doc__,
            input_schema=shape,
            output_schema=output,
            icons=ICONS,
            annotations=types.ToolAnnotations(**(hints or {})) if hints else None,
            _meta=KEPT,
        )
        TOOLS[name] = (listed, function)
        return function

    return register


@tool("echo", message=STRING, hints={"title": "Says it again", "read_only_hint": True})
async def echo(call):
    """Says the same."""
    return result(call.arguments["message"])


WEATHER = {
    "type": "object",
    "properties": {"city": STRING, "degrees": {"type": "number"}, "wind": {"type": ["string", "null"]}},
    "required": ["city", "degrees"],
}


@tool("weather", output=WEATHER, city=STRING)
async def weather(call):
    """Answers with structured content."""
    data = {"city": call.arguments["city"], "degrees": -1.5, "wind": None}
    return types.CallToolResult(content=[text(json.dumps(data))], structured_content=data)


@tool("primes", output={"type": "array", "items": {"type": "integer"}})
async def primes(call):
    """Answers with structured content that only the newest revision can hold: a list."""
    found = [2, 3, 5]
    more = {"structured_content": found} if is_modern(call.ctx) else {}
    return types.CallToolResult(content=[text(json.dumps(found))], **more)


@tool("every_content")
async def every_content(_call):
    """Answers with every kind of content."""
    blob = types.BlobResourceContents(uri="eras://blob", mime_type="image/png", blob=encoded(png()), _meta=KEPT)
    link = types.ResourceLink(
        uri="eras://text", name="text", title="A text", description="To read", mime_type="text/plain", size=5,
        icons=ICONS, annotations=NOTES, _meta=KEPT,
    )
    return types.CallToolResult(
        content=[
            types.TextContent(text="words", annotations=NOTES, _meta=KEPT),
            types.ImageContent(data=encoded(png()), mime_type="image/png", annotations=NOTES),
            types.AudioContent(data=encoded(wav()), mime_type="audio/wav"),
            embedded("eras://text", "text/plain", "hello"),
            types.EmbeddedResource(resource=blob, annotations=NOTES),
            link,
        ],
        _meta=KEPT,
    )


@tool("fails")
async def fails(_call):
    """Fails as a tool."""
    return result("This did not work", is_error=True)


@tool("breaks", code={"type": "integer"})
async def breaks(call):
    """Fails as a request, with an error code of the caller's choice."""
    raise MCPError(call.arguments["code"], "This broke", data={"why": ["because"]})


@tool("counts")
async def counts(call):
    """Reports progress three times."""
    for step in (1, 2, 3):
        await call.ctx.session.report_progress(step, 3, "step %d" % step)
        await asyncio.sleep(PAUSE_S)
    return result("counted")


@tool("logs")
async def logs(call):
    """Logs once at every level, and an object."""
    for level in LEVELS:
        await log(call, level, "at " + level)
    await log(call, "error", {"what": "an object"})
    return result("logged")


async def log(call, level, data):
    """Log for a call; what the caller did not want is left out, by the SDK for a modern one."""
    if is_modern(call.ctx) or LEVELS.index(level) >= LEVELS.index(state.level):
        await call.ctx.session.send_log_message(level, data, "eras", related_request_id=call.ctx.request_id)


@tool("sees")
async def sees(call):
    """Tells what it knows about its caller."""
    meta = {name: value for name, value in (call.ctx.meta or {}).items() if not name.startswith(META)}
    meta.pop("progress_token", None)
    meta.pop("progressToken", None)
    told = {"capabilities": call.capabilities, "meta": meta}
    return result(json.dumps(told, sort_keys=True))


@tool("region", region=dict(STRING, **{"x-mcp-header": "Region"}))
async def region(call):
    """Wants its argument as a header too, over HTTP."""
    return result("Region %s" % call.arguments["region"])


@tool("works")
async def works(call):
    """Works until it is cancelled."""
    await call.ctx.session.report_progress(0, 1)
    try:
        await asyncio.sleep(WORK_S)
    except asyncio.CancelledError:
        state.cancelled.set()
        raise
    return result("nobody cancelled")


@tool("cancelled")
async def cancelled(_call):
    """Tells whether the work was cancelled."""
    try:
        await asyncio.wait_for(state.cancelled.wait(), CANCEL_LIMIT_S)
    except asyncio.TimeoutError:
        return result("not cancelled", is_error=True)
    return result("cancelled")


# --- tools that ask ----------------------------------------------------------


def shown(answers):
    return result(json.dumps(answers, sort_keys=True))


def big_form():
    """A question with every kind of field."""
    titled = [{"const": "c", "title": "Cat"}, {"const": "d", "title": "Dog"}]
    return form(
        "Please fill in",
        required=["name"],
        name=dict(STRING, title="Name", description="Yours", minLength=1, maxLength=40),
        mail=dict(STRING, format="email", default="ada@example.test"),
        age={"type": "integer", "minimum": 0, "maximum": 150, "default": 30},
        ratio={"type": "number", "default": 0.5},
        sure={"type": "boolean", "default": True},
        color=dict(STRING, enum=["red", "green"], default="red"),
        pet=dict(STRING, oneOf=titled),
        days={"type": "array", "items": dict(STRING, enum=["mo", "tu"]), "minItems": 1},
        pets={"type": "array", "items": {"anyOf": titled}, "maxItems": 2, "default": ["c"]},
    )


def page(call, identifier):
    """A question that is answered on a web page; only a legacy one has an identifier."""
    named = {} if is_modern(call.ctx) else {"elicitation_id": identifier}
    params = types.ElicitRequestURLParams(message="Please pay", url="%s/%s" % (PAGE, identifier), **named)
    return types.ElicitRequest(params=params)


def big_sampling():
    """A question for the caller's model with every field that needs no declaration."""
    picture = types.ImageContent(data=encoded(png()), mime_type="image/png")
    params = types.CreateMessageRequestParams(
        messages=[
            types.SamplingMessage(role="user", content=text("What is this?")),
            types.SamplingMessage(role="assistant", content=text("Show me")),
            types.SamplingMessage(role="user", content=picture),
        ],
        max_tokens=20,
        system_prompt="Be brief.",
        temperature=0.5,
        stop_sequences=["."],
        include_context="none",
        metadata={"provider": {"x": 1}},
        model_preferences=types.ModelPreferences(hints=[types.ModelHint(name="any")], cost_priority=0.1),
    )
    return types.CreateMessageRequest(params=params)


@tool("asks_form")
async def asks_form(call):
    """Asks its user to fill in a form."""
    return shown(await call.ask(user=big_form()))


@tool("asks_page")
async def asks_page(call):
    """Asks its user to open a page."""
    answers = await call.ask(user=page(call, "asked"))
    if not is_modern(call.ctx):
        await call.ctx.session.send_elicit_complete("asked", related_request_id=call.ctx.request_id)
    return shown(answers)


@tool("wants_page")
async def wants_page(call):
    """Works once a page was opened; a legacy client is told so by an error."""
    if is_modern(call.ctx):
        await call.ask(user=page(call, "wanted"))
    elif not state.page_opened:
        state.page_opened = True
        wanted = page(call, "wanted").params.model_dump(by_alias=True, exclude_none=True)
        raise MCPError(URL_REQUIRED, "Open a page first", data={"elicitations": [wanted]})
    return result("paid")


@tool("asks_model")
async def asks_model(call):
    """Asks its caller's model."""
    return shown(await call.ask(model=big_sampling()))


@tool("asks_roots")
async def asks_roots(call):
    """Asks for its caller's roots."""
    return shown(await call.ask(client=roots()))


@tool("asks_twice")
async def asks_twice(call):
    """Asks twice, one after the other."""
    first = await call.ask(first=form("First?", name=STRING))
    second = await call.ask(second=form("Second?", name=STRING))
    return shown([first, second])


@tool("asks_at_once")
async def asks_at_once(call):
    """Asks three things at once."""
    return shown(await call.ask(user=form("Who?", name=STRING), model=sampling("Greet"), client=roots()))


@tool("works_and_asks")
async def works_and_asks(call):
    """Reports progress and logs, asks, and does so again."""
    if not getattr(call, "known", None):  # a modern call begins anew with its answers
        await call.ctx.session.report_progress(1, 2)
        await log(call, "warning", "before")
        await asyncio.sleep(PAUSE_S)
    answers = await call.ask(user=form("Go on?", ok={"type": "boolean"}))
    await call.ctx.session.report_progress(2, 2)
    await log(call, "warning", "after")
    await asyncio.sleep(PAUSE_S)
    return shown(answers)


# --- tools that change things ------------------------------------------------


@tool("touch", uri=STRING)
async def touch(call):
    """Says that a resource was updated."""
    uri = call.arguments["uri"]
    if is_modern(call.ctx):
        await bus.publish(ResourceUpdated(uri=uri))
    elif uri in state.watched:
        await call.ctx.session.send_resource_updated(uri)
    return result("touched")


CHANGES = {"tools": ToolsListChanged, "prompts": PromptsListChanged, "resources": ResourcesListChanged}


@tool("grow", kind=dict(STRING, enum=list(CHANGES)))
async def grow(call):
    """Adds one to the list of tools, prompts or resources."""
    kind = call.arguments["kind"]
    state.added[kind] += 1
    if is_modern(call.ctx):
        await bus.publish(CHANGES[kind]())
    else:
        await getattr(call.ctx.session, "send_%s_list_changed" % kind[:-1])()
    return result("grown")


# ---------------------------------------------------------------------------
# Prompts and resources
# ---------------------------------------------------------------------------


def argument(name, required):
    return types.PromptArgument(name=name, title=name.capitalize(), description="The " + name, required=required)


PROMPTS = [
    types.Prompt(name="plain", description="Without arguments", _meta=KEPT),
    types.Prompt(
        name="greet", title="Greeting", description="With arguments", icons=ICONS,
        arguments=[argument("who", True), argument("style", False)],
    ),
    types.Prompt(name="rich", description="With every kind of content"),
    types.Prompt(name="asks", description="Asks before it answers"),
]

RESOURCES = [
    types.Resource(
        uri="eras://text", name="text", title="A text", description="To read", mime_type="text/plain", size=5,
        icons=ICONS, annotations=NOTES, _meta=KEPT,
    ),
    types.Resource(uri="eras://blob", name="blob", mime_type="image/png"),
    types.Resource(uri="eras://asks", name="asks", description="Asks before it answers"),
]

TEMPLATES = [
    types.ResourceTemplate(
        uri_template="eras://item/{id}", name="item", title="An item", description="By its id",
        mime_type="application/json", icons=ICONS, annotations=NOTES, _meta=KEPT,
    ),
    types.ResourceTemplate(uri_template="eras://other/{id}{?more}", name="other"),
]

ITEM = "eras://item/"


async def contents_of(call, uri):
    """The contents of a resource, or None if there is none."""
    if uri == "eras://text":
        return [types.TextResourceContents(uri=uri, mime_type="text/plain", text="hello", _meta=KEPT)]
    if uri == "eras://blob":
        return [types.BlobResourceContents(uri=uri, mime_type="image/png", blob=encoded(png()))]
    if uri == "eras://asks":
        answers = await call.ask(user=form("May it be read?", ok={"type": "boolean"}))
        return [types.TextResourceContents(uri=uri, text=json.dumps(answers, sort_keys=True))]
    if uri.startswith(ITEM):
        data = json.dumps({"id": uri[len(ITEM) :]})
        return [
            types.TextResourceContents(uri=uri, mime_type="application/json", text=data),
            types.TextResourceContents(uri=uri + "/inner", text="inside"),
        ]
    return None


async def messages_of(call, name):
    if name == "plain":
        return [types.PromptMessage(role="assistant", content=text("plain"))]
    if name == "greet":
        words = "%s, %s!" % (call.arguments.get("style", "Hello"), call.arguments["who"])
        return [types.PromptMessage(role="user", content=text(words))]
    if name == "rich":
        blocks = (await every_content(call)).content
        return [types.PromptMessage(role="user", content=block) for block in blocks]
    answers = await call.ask(user=form("For whom?", name=STRING))
    return [types.PromptMessage(role="user", content=text(json.dumps(answers, sort_keys=True)))]


# ---------------------------------------------------------------------------
# Handlers
# ---------------------------------------------------------------------------


def page_of(items, params):
    """One page of a list, and the cursor of the next."""
    start = int(params.cursor) if params is not None and params.cursor else 0
    end = start + PAGE_SIZE
    return items[start:end], str(end) if end < len(items) else None


async def list_tools(ctx, params):
    tools = [listed for listed, _function in TOOLS.values()]
    if not is_modern(ctx):
        # Before, the schema of an output had to be that of an object.
        tools = [one.model_copy(update={"output_schema": None}) if one.name == "primes" else one for one in tools]
    tools += [types.Tool(name=name, input_schema={"type": "object"}) for name in grown("tools")]
    some, cursor = page_of(tools, params)
    return types.ListToolsResult(tools=some, next_cursor=cursor)


def grown(kind):
    return ["grown_%d" % number for number in range(state.added[kind])]


async def call_tool(ctx, params):
    if params.name in grown("tools"):
        return result(params.name)
    if params.name not in TOOLS:
        raise MCPError(INVALID_PARAMS, "Unknown tool: %s" % params.name)
    try:
        return await TOOLS[params.name][1](call_of(ctx, params, params.arguments))
    except MoreInput as more:
        return more.result
    except Refused as refusal:
        return result(str(refusal), is_error=True)


async def list_prompts(_ctx, params):
    some, cursor = page_of(PROMPTS + [types.Prompt(name=name) for name in grown("prompts")], params)
    return types.ListPromptsResult(prompts=some, next_cursor=cursor)


async def get_prompt(ctx, params):
    known = {prompt.name: prompt for prompt in PROMPTS}
    if params.name not in known:
        raise MCPError(INVALID_PARAMS, "Unknown prompt: %s" % params.name)
    given = params.arguments or {}
    missing = [one.name for one in known[params.name].arguments or () if one.required and one.name not in given]
    if missing:
        raise MCPError(INVALID_PARAMS, "Missing argument: %s" % ", ".join(missing))
    try:
        messages = await messages_of(call_of(ctx, params, params.arguments), params.name)
    except MoreInput as more:
        return more.result
    return types.GetPromptResult(description=known[params.name].description, messages=messages, _meta=KEPT)


async def list_resources(_ctx, params):
    more = [types.Resource(uri="eras://grown/" + name, name=name) for name in grown("resources")]
    some, cursor = page_of(RESOURCES + more, params)
    return types.ListResourcesResult(resources=some, next_cursor=cursor)


async def list_templates(_ctx, params):
    some, cursor = page_of(TEMPLATES, params)
    return types.ListResourceTemplatesResult(resource_templates=some, next_cursor=cursor)


async def read_resource(ctx, params):
    uri = str(params.uri)
    try:
        contents = await contents_of(call_of(ctx, params, None), uri)
    except MoreInput as more:
        return more.result
    if contents is None:
        code = INVALID_PARAMS if is_modern(ctx) else RESOURCE_NOT_FOUND
        raise MCPError(code, "Resource not found", data={"uri": uri})
    return types.ReadResourceResult(contents=contents, _meta=KEPT)


async def subscribe(_ctx, params):
    state.watched.add(str(params.uri))
    return types.EmptyResult()


async def unsubscribe(_ctx, params):
    state.watched.discard(str(params.uri))
    return types.EmptyResult()


async def set_level(_ctx, params):
    state.level = params.level
    return types.EmptyResult()


STYLES = ("Good day", "Good morning", "Hello")


async def complete(_ctx, params):
    """Completes a style by its start; what else was given shows in the last value."""
    values = [style for style in STYLES if style.startswith(params.argument.value)]
    values.append(getattr(params.ref, "name", None) or str(params.ref.uri))
    if params.context is not None and params.context.arguments:
        values.append(json.dumps(params.context.arguments, sort_keys=True))
    return types.CompleteResult(completion=types.Completion(values=values, total=len(values), has_more=False))


# ---------------------------------------------------------------------------
# Serving
# ---------------------------------------------------------------------------


class ErasServer(Server):
    """A server that announces to legacy clients, too, that its lists change."""

    def create_initialization_options(self, *_arguments, **_named):
        return super().create_initialization_options(NotificationOptions(True, True, True))


def only(era):
    """A middleware that refuses requests of the other era."""

    async def middleware(ctx, call_next):
        if is_modern(ctx) != (era == "modern"):
            raise MCPError(INVALID_PARAMS, "This server is %s only, this is %s" % (era, ctx.protocol_version))
        return await call_next(ctx)

    return middleware


def make_server():
    hint = CacheHint(ttl_ms=1000, scope="private")
    cacheable = ("tools/list", "prompts/list", "resources/list", "resources/templates/list", "resources/read")
    return ErasServer(
        "eras",
        version="1.0.0",
        title="Both eras",
        description="Offers every feature",
        instructions="Look at the differences.",
        website_url="https://example.test/",
        icons=ICONS,
        cache_hints={method: hint for method in cacheable + ("server/discover",)},
        on_list_tools=list_tools,
        on_call_tool=call_tool,
        on_list_prompts=list_prompts,
        on_get_prompt=get_prompt,
        on_list_resources=list_resources,
        on_list_resource_templates=list_templates,
        on_read_resource=read_resource,
        on_subscribe_resource=subscribe,
        on_unsubscribe_resource=unsubscribe,
        on_set_logging_level=set_level,
        on_completion=complete,
        on_subscriptions_listen=ListenHandler(bus),
    )


def main(argv):
    parser = argparse.ArgumentParser(description="a server of both eras")
    parser.add_argument("--era", choices=("legacy", "modern"))
    options = parser.parse_args(argv)
    server = make_server()
    if options.era:
        server.middleware.append(only(options.era))
    asyncio.run(serve_stdio(server))


if __name__ == "__main__":
    main(sys.argv[1:])
