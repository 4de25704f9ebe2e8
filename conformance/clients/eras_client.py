"""The official Python SDK 2.x as a host of either era, run in its own virtual environment.

usage: python eras_client.py < PLAN.json > TRANSCRIPT.json

check_eras.py describes the plan and the transcript; eras_client.mjs does the
same with the TypeScript SDK.
"""
import asyncio
import json
import sys
import warnings
from contextlib import asynccontextmanager

import anyio
import mcp_types as types
from mcp import Client, MCPError, StdioServerParameters
from mcp.client.streamable_http import streamable_http_client
from mcp.shared._httpx_utils import create_mcp_http_client
from mcp.shared.exceptions import MCPDeprecationWarning

warnings.simplefilter("ignore", MCPDeprecationWarning)

STEP_LIMIT_S = 30
# What is sent just before an answer may be told just after it.
SETTLE_S = 0.01
LOG_LEVEL = "io.modelcontextprotocol/logLevel"


def shown(model):
    """A model as it was on the wire: what was not sent is not shown."""
    return model.model_dump(by_alias=True, exclude_unset=True, mode="json")


class Host:
    """A client, and what it heard and was asked in the current step."""

    def __init__(self, plan):
        self.plan = plan
        self.answers = plan["answers"]
        self.level = None  # that a modern client has in each request
        self.listening = None  # where a modern client keeps its subscription
        self.step = {}
        self.heard = []  # every change that was announced, as [method, uri]
        self.begin({})

    def begin(self, step):
        self.step = step
        self.record = {"asked": [], "logs": [], "progress": []}
        self.progressed = asyncio.Event()

    # --- what it answers ----------------------------------------------------

    def note(self, method, params):
        asked = {"method": method}
        if params is not None:
            asked["params"] = shown(params)
        self.record["asked"].append(asked)

    async def on_elicitation(self, _context, params):
        self.note("elicitation/create", params)
        refusal = self.step.get("refuse")
        if refusal in ("decline", "cancel"):
            return types.ElicitResult(action=refusal)
        if params.mode == "url":
            return types.ElicitResult(action="accept")
        fields = params.requested_schema["properties"]
        known = self.answers["form"]
        return types.ElicitResult(action="accept", content={name: known[name] for name in fields if name in known})

    async def on_sampling(self, _context, params):
        self.note("sampling/createMessage", params)
        if self.step.get("refuse") == "error":
            return types.ErrorData(code=-1, message="User rejected sampling request")
        return types.CreateMessageResult.model_validate(self.answers["sampling"])

    async def on_roots(self, _context):
        self.note("roots/list", None)
        return types.ListRootsResult.model_validate({"roots": self.answers["roots"]})

    # --- what it hears ------------------------------------------------------

    async def on_log(self, params):
        self.record["logs"].append(shown(params))

    async def on_message(self, message):
        method = getattr(message, "method", None)
        if method in ("notifications/message", "notifications/progress", None):
            return
        params = shown(message.params) if message.params is not None else {}
        self.heard.append([method, params.get("uri") or params.get("elicitationId")])

    async def on_progress(self, progress, total, message):
        self.record["progress"].append([progress, total, message])
        self.progressed.set()

    # --- what it does -------------------------------------------------------

    def meta(self):
        meta = dict((self.step.get("params") or {}).get("_meta") or {})
        if self.level and self.is_modern:
            meta[LOG_LEVEL] = self.level
        return meta or None

    @property
    def is_modern(self):
        return self.client.protocol_version >= "2026"

    async def call(self):
        params = self.step["params"]
        watcher = self.on_progress if self.step.get("progress") else None
        return await self.client.call_tool(
            params["name"], params.get("arguments"), progress_callback=watcher, meta=self.meta()
        )

    async def get_prompt(self):
        params = self.step["params"]
        return await self.client.get_prompt(params["name"], params.get("arguments"), meta=self.meta())

    async def complete(self):
        params = self.step["params"]
        ref = params["ref"]
        kind = types.PromptReference if ref["type"] == "ref/prompt" else types.ResourceTemplateReference
        return await self.client.complete(
            kind.model_validate(ref), params["argument"], (params.get("context") or {}).get("arguments")
        )

    async def request(self):
        method = self.step["method"]
        if method == "ping":
            return await self.client.send_ping()
        if method == "resources/read":
            return await self.client.read_resource(self.step["params"]["uri"], meta=self.meta())
        handlers = {"tools/call": self.call, "prompts/get": self.get_prompt, "completion/complete": self.complete}
        return await handlers[method]()

    async def list_all(self):
        """Every page of a list as one result; how many pages there were is the server's own affair."""
        listing, key = {
            "tools/list": (self.client.list_tools, "tools"),
            "prompts/list": (self.client.list_prompts, "prompts"),
            "resources/list": (self.client.list_resources, "resources"),
            "resources/templates/list": (self.client.list_resource_templates, "resourceTemplates"),
        }[self.step["method"]]
        items, cursor = [], None
        while True:
            page = shown(await listing(cursor=cursor))
            items += page[key]
            cursor = page.pop("nextCursor", None)
            if cursor is None:
                return dict(page, **{key: items})

    async def cancel(self):
        """Begin a call, and give it up once it is plainly under way."""
        async with anyio.create_task_group() as group:
            group.start_soon(self.call)
            await self.progressed.wait()
            group.cancel_scope.cancel()
        return {"given up": True}

    async def set_level(self):
        self.level = self.step["level"]
        if not self.is_modern:
            await self.client.set_logging_level(self.level)
        return {"level": self.level}

    async def watch(self):
        """Have changes of all lists and of some resources announced."""
        uris = self.step["uris"]
        if not self.is_modern:
            for uri in uris:
                await self.client.subscribe_resource(uri)
            return {"watching": uris}
        self.listening = self.client.listen(
            tools_list_changed=True,
            prompts_list_changed=True,
            resources_list_changed=True,
            resource_subscriptions=uris,
        )
        subscription = await self.listening.__aenter__()
        return {"watching": uris, "honored": shown(subscription.honored)}

    async def unwatch(self):
        if self.is_modern:
            await self.listening.__aexit__(None, None, None)
        else:
            for uri in self.step["uris"]:
                await self.client.unsubscribe_resource(uri)
        return {}

    async def wait(self):
        """Wait until a change of a kind has been announced since the last wait for it."""
        wanted = [self.step["method"], self.step.get("uri")]
        deadline = asyncio.get_running_loop().time() + self.step["seconds"]
        while asyncio.get_running_loop().time() < deadline:
            if wanted in self.heard:
                self.heard = [one for one in self.heard if one != wanted]
                return {"came": True}
            await asyncio.sleep(0.02)
        return {"came": False}

    DEEDS = {
        "request": request,
        "list": list_all,
        "cancel": cancel,
        "level": set_level,
        "watch": watch,
        "unwatch": unwatch,
        "wait": wait,
    }

    async def perform(self, step):
        """The record of one step, whatever happened."""
        self.begin(step)
        record = self.record
        try:
            outcome = await asyncio.wait_for(self.DEEDS[step["do"]](self), STEP_LIMIT_S)
            record["result"] = outcome if isinstance(outcome, dict) else shown(outcome)
        except MCPError as error:
            record["error"] = shown(error.error)
        except asyncio.TimeoutError:
            record["error"] = {"message": "no answer within %d s" % STEP_LIMIT_S}
        except Exception as error:  # the SDK's own verdict on a result, for instance
            record["error"] = {"message": "%s: %s" % (type(error).__name__, error)}
        await asyncio.sleep(SETTLE_S)
        return record

    # --- the whole of it ----------------------------------------------------

    @asynccontextmanager
    async def connected(self):
        server = self.plan["server"]
        async with transport_to(server) as transport:
            self.client = Client(
                transport,
                mode=self.plan["mode"],
                cache=None,
                read_timeout_seconds=STEP_LIMIT_S,
                elicitation_callback=self.on_elicitation,
                sampling_callback=self.on_sampling,
                list_roots_callback=self.on_roots,
                logging_callback=self.on_log,
                message_handler=self.on_message,
            )
            async with self.client:
                yield

    def greeting(self):
        session = self.client.session
        greeting = session.initialize_result or session.discover_result
        return shown(greeting)

    async def run(self):
        async with self.connected():
            greeting = self.greeting()
            records = [await self.perform(step) for step in self.plan["steps"]]
        return {"version": greeting.get("protocolVersion", "2026-07-28"), "greeting": greeting, "steps": records}


@asynccontextmanager
async def transport_to(server):
    if "url" not in server:
        yield StdioServerParameters(**server)
        return
    async with create_mcp_http_client(headers=server["headers"]) as http:
        yield streamable_http_client(server["url"], http_client=http)


if __name__ == "__main__":
    print(json.dumps(asyncio.run(Host(json.load(sys.stdin)).run())))
