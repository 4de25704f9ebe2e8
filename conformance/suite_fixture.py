#!/usr/bin/env python3
"""The server that the official conformance suite asks for, on the official SDK.

Offers every tool, prompt and resource that the suite's server scenarios call,
under the names that the suite gives them, in every revision that the SDK
speaks. One process serves one client over stdio, or many with `--http`.

    suite_fixture.py                stdio, as a child of mcpx
    suite_fixture.py --http PORT    Streamable HTTP on the loopback address,
                                    to run the suite without mcpx in between

A client over stdio fixes the era of the process by its first message: the SDK
serves either the handshake or 2026-07-28 on one pipe.
"""
import argparse
import asyncio
import base64
import json
import re
import struct
import sys
import warnings
import zlib

import mcp_types as types
from mcp.server.caching import CacheHint
from mcp.server.lowlevel.server import NotificationOptions, Server
from mcp.server.stdio import stdio_server
from mcp.server.streamable_http import EventMessage, EventStore
from mcp.server.subscriptions import (
    InMemorySubscriptionBus,
    ListenHandler,
    PromptsListChanged,
    ToolsListChanged,
)
from mcp.shared.exceptions import MCPDeprecationWarning, MCPError

import suite_tasks
from suite_asking import INVALID_PARAMS, STRING, MoreInput, Refused, call_of, form, is_modern, roots, sampling

# The suite asks for what the newest revision has deprecated.
warnings.simplefilter("ignore", MCPDeprecationWarning)

RESOURCE_NOT_FOUND = -32002  # up to 2025-11-25

# Between two messages of a tool that sends several.
PAUSE_S = 0.05
# How long the tool that hangs up is away from its stream. A proxy of a server that says
# nothing meanwhile makes a stream of the answer in this time, so that there is one to test.
RECONNECT_S = 3.2
RETRY_MS = 300

bus = InMemorySubscriptionBus()


# ---------------------------------------------------------------------------
# Content
# ---------------------------------------------------------------------------


def png():
    """A red pixel."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", 1, 1, 8, 2, 0, 0, 0)
    pixels = zlib.compress(b"\0\xff\0\0")
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


def wav():
    """Four samples of silence."""
    samples = bytes(4)
    form_chunk = struct.pack("<4sIHHIIHH", b"fmt ", 16, 1, 1, 8000, 8000, 1, 8)
    data_chunk = struct.pack("<4sI", b"data", len(samples)) + samples
    return struct.pack("<4sI4s", b"RIFF", 4 + len(form_chunk) + len(data_chunk), b"WAVE") + form_chunk + data_chunk


def encoded(data):
    return base64.b64encode(data).decode()


def text(value):
    return types.TextContent(text=value)


def image():
    return types.ImageContent(data=encoded(png()), mime_type="image/png")


def embedded(uri, mime_type, value):
    contents = types.TextResourceContents(uri=uri, mime_type=mime_type, text=value)
    return types.EmbeddedResource(resource=contents)


def result(*blocks, is_error=False):
    return types.CallToolResult(content=[text(b) if isinstance(b, str) else b for b in blocks], is_error=is_error)


# ---------------------------------------------------------------------------
# Tools
# ---------------------------------------------------------------------------

TOOLS = {}  # name -> (types.Tool, function of a call)


def tool(name, description, schema=None, **properties):
    """Register a tool; its properties are all required."""

    def register(function):
        shape = schema or {"type": "object", "properties": properties, "required": list(properties)}
        TOOLS[name] = (types.Tool(name=name, description=description, input_schema=shape), function)
        return function

    return register


@tool("test_simple_text", "Answers with a line of text")
async def simple_text(_call):
    return result("This is a simple text response for testing.")


@tool("test_image_content", "Answers with an image")
async def image_content(_call):
    return result(image())


@tool("test_audio_content", "Answers with a sound")
async def audio_content(_call):
    return result(types.AudioContent(data=encoded(wav()), mime_type="audio/wav"))


@tool("test_embedded_resource", "Answers with an embedded resource")
async def embedded_resource(_call):
    return result(embedded("test://embedded-resource", "text/plain", "This is an embedded resource content."))


@tool("test_multiple_content_types", "Answers with text, an image and a resource")
async def multiple_content_types(_call):
    value = json.dumps({"test": "data", "value": 123})
    resource = embedded("test://mixed-content-resource", "application/json", value)
    return result("Multiple content types test:", image(), resource)


@tool("test_error_handling", "Always fails")
async def error_handling(_call):
    return result("This tool intentionally returns an error for testing", is_error=True)


@tool("test_tool_with_logging", "Writes three log messages")
async def with_logging(call):
    for line in ("Tool execution started", "Tool processing data", "Tool execution completed"):
        await call.log(line)
        await asyncio.sleep(PAUSE_S)
    return result("Logged three messages.")


@tool("test_logging_tool", "Writes log messages for callers that want them")
async def logging_tool(call):
    return await with_logging(call)


@tool("test_tool_with_progress", "Reports its progress three times")
async def with_progress(call):
    for done in (0, 50, 100):
        await call.progress(done, 100)
        await asyncio.sleep(PAUSE_S)
    return result("Reported progress three times.")


@tool("test_reconnection", "Hangs up in the middle of the call, where its transport can")
async def reconnection(call):
    if call.ctx.close_sse_stream is not None:
        await asyncio.sleep(PAUSE_S)
        await call.ctx.close_sse_stream()
    else:
        # Over stdio only the proxy has a stream; this makes it use one.
        await call.log("Tool execution started")
    await asyncio.sleep(RECONNECT_S)
    return result("Reconnection test completed.")


JSON_SCHEMA_2020_12 = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "$defs": {
        "address": {
            "$anchor": "addressDef",
            "type": "object",
            "properties": {"street": STRING, "city": STRING},
        }
    },
    "properties": {
        "name": STRING,
        "address": {"$ref": "#/$defs/address"},
        "contactMethod": {"type": "string", "enum": ["phone", "email"]},
        "phone": STRING,
        "email": STRING,
    },
    "allOf": [{"anyOf": [{"required": ["phone"]}, {"required": ["email"]}]}],
    "if": {"properties": {"contactMethod": {"const": "phone"}}, "required": ["contactMethod"]},
    "then": {"required": ["phone"]},
    "else": {"required": ["email"]},
    "additionalProperties": False,
}


@tool("json_schema_2020_12_tool", "Has an input schema with keywords of JSON Schema 2020-12", JSON_SCHEMA_2020_12)
async def json_schema_tool(call):
    return result("Called with %s" % json.dumps(call.arguments, sort_keys=True))


@tool("test_x_mcp_header", "Wants its argument as a header too", region=dict(STRING, **{"x-mcp-header": "Region"}))
async def header_tool(call):
    return result("Region %s" % call.arguments.get("region"))


# --- tools that change lists ------------------------------------------------

changes = {"tools": 0, "prompts": 0}


def changed(kind):
    """A sentence that differs after every change, so that the list really does."""
    return "Changed %d times" % changes[kind]


@tool("test_trigger_tool_change", "Changes the list of tools")
async def trigger_tool_change(call):
    changes["tools"] += 1
    if is_modern(call.ctx):
        await bus.publish(ToolsListChanged())
    else:
        await call.ctx.session.send_tool_list_changed()
    return result("The list of tools has changed.")


@tool("test_trigger_prompt_change", "Changes the list of prompts")
async def trigger_prompt_change(call):
    changes["prompts"] += 1
    if is_modern(call.ctx):
        await bus.publish(PromptsListChanged())
    else:
        await call.ctx.session.send_prompt_list_changed()
    return result("The list of prompts has changed.")


# --- tools that ask ----------------------------------------------------------


@tool("test_sampling", "Has the caller's model answer a prompt", prompt=STRING)
async def test_sampling(call):
    answers = await call.ask(answer=sampling(call.arguments["prompt"]))
    return result("LLM response: %s" % answers["answer"]["content"]["text"])


@tool("test_elicitation", "Asks the user for a name and an address", message=STRING)
async def test_elicitation(call):
    username = dict(STRING, description="User's response")
    email = dict(STRING, description="User's email address")
    answers = await call.ask(user=form(call.arguments["message"], username=username, email=email))
    return result("User response: %s" % shown(answers["user"]))


def shown(answer):
    return "action=%s, content=%s" % (answer["action"], json.dumps(answer.get("content", {}), sort_keys=True))


@tool("test_elicitation_sep1034_defaults", "Asks with a default for every primitive type")
async def elicitation_defaults(call):
    question = form(
        "Please review these values",
        required=[],
        name=dict(STRING, default="John Doe"),
        age={"type": "integer", "default": 30},
        score={"type": "number", "default": 95.5},
        status=dict(STRING, enum=["active", "inactive", "pending"], default="active"),
        verified={"type": "boolean", "default": True},
    )
    answers = await call.ask(values=question)
    return result("Elicitation completed: %s" % shown(answers["values"]))


def titled(*pairs):
    return [{"const": value, "title": title} for value, title in pairs]


@tool("test_elicitation_sep1330_enums", "Asks with every kind of choice")
async def elicitation_enums(call):
    options = ["option1", "option2", "option3"]
    names = ("value1", "First"), ("value2", "Second"), ("value3", "Third")
    question = form(
        "Please choose",
        required=[],
        untitledSingle=dict(STRING, enum=options),
        titledSingle=dict(STRING, oneOf=titled(*((value, name + " Option") for value, name in names))),
        legacyEnum=dict(STRING, enum=["opt1", "opt2", "opt3"], enumNames=["Option One", "Option Two", "Option Three"]),
        untitledMulti={"type": "array", "items": dict(STRING, enum=options)},
        titledMulti={
            "type": "array",
            "items": {"anyOf": titled(*((value, name + " Choice") for value, name in names))},
        },
    )
    answers = await call.ask(choices=question)
    return result("Elicitation completed: %s" % shown(answers["choices"]))


@tool("test_missing_capability", "Needs a caller whose model can be asked")
async def missing_capability(call):
    await call.ask(answer=sampling("Is anybody there?"))
    return result("Somebody was there.")


@tool("test_streaming_elicitation", "Asks the user in the middle of its work")
async def streaming_elicitation(call):
    answers = await call.ask(confirm=form("Go on?", ok={"type": "boolean"}))
    return result("The user said %s." % shown(answers["confirm"]))


NAME_QUESTION = form("What is your name?", name=STRING)
CONFIRM_QUESTION = form("Please confirm", ok={"type": "boolean"})


@tool("test_input_required_result_elicitation", "Asks for a name and greets")
async def input_elicitation(call):
    answers = await call.ask(user_name=NAME_QUESTION)
    return result("Hello, %s!" % answers["user_name"].get("content", {}).get("name"))


@tool("test_input_required_result_sampling", "Asks the caller's model about France")
async def input_sampling(call):
    answers = await call.ask(capital_question=sampling("What is the capital of France?"))
    return result(answers["capital_question"]["content"]["text"])


@tool("test_input_required_result_list_roots", "Asks for the roots")
async def input_roots(call):
    answers = await call.ask(client_roots=roots())
    return result("Roots: %s" % ", ".join(root["uri"] for root in answers["client_roots"]["roots"]))


@tool("test_input_required_result_request_state", "Asks, and knows its own state again")
async def input_state(call):
    answers = await call.ask(confirm=CONFIRM_QUESTION)
    return result("state-ok, %s" % shown(answers["confirm"]))


@tool("test_input_required_result_tampered_state", "Asks, and refuses a state that is not its own")
async def input_tampered(call):
    return await input_state(call)


@tool("test_input_required_result_multiple_inputs", "Asks three things at once")
async def input_multiple(call):
    answers = await call.ask(
        user_name=NAME_QUESTION, greeting=sampling("Generate a greeting", 50), client_roots=roots()
    )
    count = len(answers["client_roots"]["roots"])
    return result("%s (%s, %d roots)" % (answers["greeting"]["content"]["text"], shown(answers["user_name"]), count))


@tool("test_input_required_result_multi_round", "Asks twice, one after the other")
async def input_multi_round(call):
    first = await call.ask(step1=form("Step 1: What is your name?", name=STRING))
    second = await call.ask(step2=form("Step 2: What is your favorite color?", color=STRING))
    return result("%s; %s" % (shown(first["step1"]), shown(second["step2"])))


@tool("test_input_required_result_capabilities", "Asks only what the caller can answer")
async def input_capabilities(call):
    requests = {}
    if call.can("sampling"):
        requests["from_model"] = sampling("Say something")
    if call.can("elicitation"):
        requests["from_user"] = form("Say something", words=STRING)
    answers = await call.ask(**requests) if requests else {}
    return result("Answered: %s" % (", ".join(sorted(answers)) or "nobody could be asked"))


# ---------------------------------------------------------------------------
# Prompts
# ---------------------------------------------------------------------------

PROMPTS = {}  # name -> (types.Prompt, function of a call that returns contents)


def prompt(name, description, **arguments):
    """Register a prompt; its arguments (name=description) are all required."""

    def register(function):
        listed = [types.PromptArgument(name=key, description=value, required=True) for key, value in arguments.items()]
        PROMPTS[name] = (types.Prompt(name=name, description=description, arguments=listed or None), function)
        return function

    return register


@prompt("test_simple_prompt", "A prompt without arguments")
async def simple_prompt(_call):
    return [text("This is a simple prompt for testing.")]


@prompt("test_prompt_with_arguments", "A prompt with two arguments", arg1="First test argument", arg2="Second one")
async def prompt_with_arguments(call):
    return [text("Prompt with arguments: arg1='%(arg1)s', arg2='%(arg2)s'" % call.arguments)]


@prompt("test_prompt_with_embedded_resource", "A prompt that embeds a resource", resourceUri="What to embed")
async def prompt_with_resource(call):
    resource = embedded(call.arguments["resourceUri"], "text/plain", "Embedded resource content for testing.")
    return [resource, text("Please process the embedded resource above.")]


@prompt("test_prompt_with_image", "A prompt that shows an image")
async def prompt_with_image(_call):
    return [image(), text("Please analyze the image above.")]


@prompt("test_input_required_result_prompt", "A prompt that asks for its context first")
async def prompt_that_asks(call):
    answers = await call.ask(user_context=form("What context should the prompt use?", context=STRING))
    return [text("Use this context: %s" % shown(answers["user_context"]))]


# ---------------------------------------------------------------------------
# Resources
# ---------------------------------------------------------------------------

TEMPLATE = re.compile(r"test://template/([^/]+)/data\Z")

RESOURCES = (
    types.Resource(
        uri="test://static-text", name="static-text", description="A text", mime_type="text/plain"
    ),
    types.Resource(
        uri="test://static-binary", name="static-binary", description="An image", mime_type="image/png"
    ),
    types.Resource(
        uri="test://watched-resource", name="watched-resource", description="A text to watch", mime_type="text/plain"
    ),
)
TEMPLATES = (
    types.ResourceTemplate(
        uri_template="test://template/{id}/data",
        name="template-data",
        description="Data by id",
        mime_type="application/json",
    ),
)


def contents_of(uri):
    """The contents of a resource, or None if there is none."""
    if uri == "test://static-text":
        value = "This is the content of the static text resource."
        return types.TextResourceContents(uri=uri, mime_type="text/plain", text=value)
    if uri == "test://static-binary":
        return types.BlobResourceContents(uri=uri, mime_type="image/png", blob=encoded(png()))
    if uri == "test://watched-resource":
        return types.TextResourceContents(uri=uri, mime_type="text/plain", text="Watched resource content.")
    found = TEMPLATE.match(uri)
    if found:
        data = {"id": found.group(1), "templateTest": True, "data": "Data for ID: " + found.group(1)}
        return types.TextResourceContents(uri=uri, mime_type="application/json", text=json.dumps(data))
    return None


# ---------------------------------------------------------------------------
# Handlers
# ---------------------------------------------------------------------------


async def list_tools(ctx, _params):
    tools = [listed for listed, _function in TOOLS.values()] + suite_tasks.tools(legacy=not is_modern(ctx))
    tools.append(
        types.Tool(name="test_dynamic_tool", description=changed("tools"), input_schema={"type": "object"})
    )
    return types.ListToolsResult(tools=tools)


async def call_tool(ctx, params):
    if params.name == "test_dynamic_tool":
        return result(changed("tools"))
    if params.name not in TOOLS:
        raise MCPError(INVALID_PARAMS, "Unknown tool: %s" % params.name)
    _listed, function = TOOLS[params.name]
    try:
        return await function(call_of(ctx, params, params.arguments))
    except MoreInput as more:
        return more.result
    except Refused as refusal:
        return result(str(refusal), is_error=True)


async def list_prompts(_ctx, _params):
    prompts = [listed for listed, _function in PROMPTS.values()]
    prompts.append(types.Prompt(name="test_dynamic_prompt", description=changed("prompts")))
    return types.ListPromptsResult(prompts=prompts)


async def get_prompt(ctx, params):
    if params.name == "test_dynamic_prompt":
        return messages([text(changed("prompts"))])
    if params.name not in PROMPTS:
        raise MCPError(INVALID_PARAMS, "Unknown prompt: %s" % params.name)
    listed, function = PROMPTS[params.name]
    missing = [argument.name for argument in listed.arguments or () if argument.name not in (params.arguments or {})]
    if missing:
        raise MCPError(INVALID_PARAMS, "Missing argument: %s" % ", ".join(missing))
    try:
        return messages(await function(call_of(ctx, params, params.arguments)))
    except MoreInput as more:
        return more.result
    except Refused as refusal:
        raise MCPError(INVALID_PARAMS, str(refusal)) from refusal


def messages(contents):
    return types.GetPromptResult(messages=[types.PromptMessage(role="user", content=one) for one in contents])


async def list_resources(_ctx, _params):
    return types.ListResourcesResult(resources=list(RESOURCES))


async def list_templates(_ctx, _params):
    return types.ListResourceTemplatesResult(resource_templates=list(TEMPLATES))


async def read_resource(ctx, params):
    contents = contents_of(str(params.uri))
    if contents is None:
        code = INVALID_PARAMS if is_modern(ctx) else RESOURCE_NOT_FOUND
        raise MCPError(code, "Resource not found", data={"uri": str(params.uri)})
    return types.ReadResourceResult(contents=[contents])


async def accept(_ctx, _params):
    """For requests that need no more than to be understood."""
    return types.EmptyResult()


async def complete(_ctx, params):
    known = ("test", "testing", "tested")
    values = [value for value in known if value.startswith(params.argument.value)]
    return types.CompleteResult(completion=types.Completion(values=values, total=len(values), has_more=False))


# ---------------------------------------------------------------------------
# Serving
# ---------------------------------------------------------------------------


class SuiteServer(Server):
    """A server that tells a legacy client at its start what that client's revision has."""

    def create_initialization_options(self, *_arguments, **_named):
        lists_change = NotificationOptions(prompts_changed=True, tools_changed=True)
        options = super().create_initialization_options(lists_change)
        options.capabilities.extensions = None
        options.capabilities.tasks = suite_tasks.LEGACY_CAPABILITY
        return options


def make_server():
    hint = CacheHint(ttl_ms=1000, scope="private")
    listing = ("tools/list", "prompts/list", "resources/list", "resources/templates/list")
    server = SuiteServer(
        "suite-fixture",
        version="1.0.0",
        instructions="Serves the official conformance suite.",
        cache_hints={method: hint for method in listing + ("resources/read", "server/discover")},
        on_list_tools=list_tools,
        on_call_tool=call_tool,
        on_list_prompts=list_prompts,
        on_get_prompt=get_prompt,
        on_list_resources=list_resources,
        on_list_resource_templates=list_templates,
        on_read_resource=read_resource,
        on_subscribe_resource=accept,
        on_unsubscribe_resource=accept,
        on_set_logging_level=accept,
        on_completion=complete,
        on_subscriptions_listen=ListenHandler(bus),
    )
    suite_tasks.install(server)
    return server


async def serve_stdio(server):
    async with stdio_server() as (incoming, outgoing):
        await server.run(incoming, outgoing, server.create_initialization_options())


class Events(EventStore):
    """What was sent on each stream, so that a client can come back for the rest."""

    def __init__(self):
        self.sent = []  # (stream, message), an event's id is its place in it

    async def store_event(self, stream_id, message):
        self.sent.append((stream_id, message))
        return str(len(self.sent) - 1)

    async def replay_events_after(self, last_event_id, send_callback):
        last = int(last_event_id)
        stream_id = self.sent[last][0]
        for number, (stream, message) in enumerate(self.sent):
            if number > last and stream == stream_id and message is not None:
                await send_callback(EventMessage(message, str(number)))
        return stream_id


def serve_http(server, port):
    import uvicorn

    app = server.streamable_http_app(event_store=Events(), retry_interval=RETRY_MS)
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning")


def main(argv):
    parser = argparse.ArgumentParser(description="the conformance suite's server")
    parser.add_argument("--http", metavar="PORT", type=int)
    options = parser.parse_args(argv)
    server = make_server()
    if options.http:
        serve_http(server, options.http)
    else:
        asyncio.run(serve_stdio(server))


if __name__ == "__main__":
    main(sys.argv[1:])
