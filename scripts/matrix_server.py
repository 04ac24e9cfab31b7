"""A server on the official SDK with everything that the era of 2026-07-28 has; scripts/matrix.py starts it."""

import anyio
from mcp.server import MCPServer
from mcp.server.mcpserver import Context
from mcp_types import (
    CallToolResult,
    Completion,
    CompletionArgument,
    CompletionContext,
    CreateMessageRequest,
    CreateMessageRequestParams,
    ElicitRequest,
    ElicitRequestFormParams,
    InputRequest,
    InputRequiredResult,
    ListRootsRequest,
    PromptReference,
    ResourceTemplateReference,
    SamplingMessage,
    TextContent,
)

server = MCPServer("modern", version="1")
QUESTIONS: dict[str, InputRequest] = {
    "elicit": ElicitRequest(
        params=ElicitRequestFormParams(
            message="Who?",
            requested_schema={"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]},
        )
    ),
    "sample": CreateMessageRequest(
        params=CreateMessageRequestParams(
            messages=[SamplingMessage(role="user", content=TextContent(type="text", text="Hello"))], max_tokens=10
        )
    ),
    "roots": ListRootsRequest(),
}


@server.tool()
def ask(what: str, context: Context) -> CallToolResult | InputRequiredResult:
    """Asks the client one thing, and answers with what it said."""
    given = (context.input_responses or {}).get(what)
    if given is None:
        return InputRequiredResult(input_requests={what: QUESTIONS[what]}, request_state=what)
    return CallToolResult(content=[TextContent(type="text", text=given.model_dump_json(by_alias=True))])


@server.tool()
async def work(steps: int, seconds: float, context: Context) -> str:
    """Takes its time, and says how far it is."""
    for step in range(1, steps + 1):
        await anyio.sleep(seconds / steps)
        await context.report_progress(step, steps, f"step {step}")
    return f"{steps} steps"


@server.tool()
async def log(context: Context) -> str:
    """Says something at two levels."""
    await context.debug("quietly")
    await context.warning("loudly")
    return "logged"


@server.tool()
async def touch(context: Context) -> str:
    """Says that a resource and the list of tools have changed."""
    await context.notify_resource_updated("note://a")
    await context.notify_tools_changed()
    return "touched"


@server.resource("note://a")
def note() -> str:
    return "a note"


@server.resource("note://of/{name}")
def note_of(name: str) -> str:
    return f"a note of {name}"


@server.prompt()
def greet(name: str) -> str:
    return f"Greet {name}."


@server.completion()  # type: ignore[no-untyped-call, untyped-decorator]  # the SDK says nothing of its type
async def complete(
    ref: PromptReference | ResourceTemplateReference, argument: CompletionArgument, context: CompletionContext | None
) -> Completion:
    names = ["Ada", "Adam", "Ben"]
    return Completion(values=[name for name in names if name.startswith(argument.value)])


if __name__ == "__main__":
    server.run("stdio")
