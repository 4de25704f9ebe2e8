"""The official Python SDK 2.x as a host in legacy mode, in its own virtual environment.

usage: python sdk2_client.py < PLAN.json > TRANSCRIPT.json

The same plan and transcript as sdk1_client.py, for lists, calls and reads; it
offers nothing to the server and does not note what it hears.
"""
import asyncio
import json
import sys

from mcp import Client, MCPError, StdioServerParameters


def shown(result):
    return result.model_dump(by_alias=True, exclude_none=True, mode="json")


REQUESTS = {
    "tools/list": lambda c, p: c.list_tools(),
    "prompts/list": lambda c, p: c.list_prompts(),
    "resources/list": lambda c, p: c.list_resources(),
    "resources/templates/list": lambda c, p: c.list_resource_templates(),
    "resources/read": lambda c, p: c.read_resource(p["uri"]),
    "prompts/get": lambda c, p: c.get_prompt(p["name"], p.get("arguments")),
    "tools/call": lambda c, p: c.call_tool(p["name"], p["arguments"]),
}


async def attempt(client, step):
    try:
        record = {"result": shown(await REQUESTS[step["method"]](client, step.get("params")))}
    except MCPError as error:
        record = {"error": shown(error.error)}
    except Exception as error:  # the SDK's own verdict on a result, for instance
        record = {"error": {"message": "%s: %s" % (type(error).__name__, error)}}
    return dict(record, heard=[])


async def main(plan):
    parameters = StdioServerParameters(**plan["server"])
    async with Client(parameters, mode="legacy", read_timeout_seconds=60) as client:
        greeting = {
            "protocolVersion": client.protocol_version,
            "capabilities": shown(client.server_capabilities),
            "serverInfo": shown(client.server_info),
            "instructions": client.instructions,
        }
        return {"initialize": greeting, "steps": [await attempt(client, s) for s in plan["steps"]], "all": []}


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main(json.load(sys.stdin)))))
