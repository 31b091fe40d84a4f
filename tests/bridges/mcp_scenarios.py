"""Programs that use McpTools: `mcp_scenarios.py SCENARIO PARAMETERS` prints what the scenario returns, as JSON.

Runs in .venv-bridges, because the client needs the package mcp too.
"""

import asyncio
import json
import os
import signal
import sys
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

from asterism.tasks.bridges.mcp_tools import McpTools

BRIEF_S = 0.5  # seconds in which a call surely reaches the server


async def call(tools: McpTools, tool: str, /, **arguments: Any) -> str:
    """Make a call in its own task, as the host does. Return the result."""
    return await asyncio.create_task(tools.call_tool(tool, arguments))


async def catch(work: Awaitable[Any]) -> list[str]:
    """Return the name and the text of the exception that `work` raises."""
    try:
        await work
    except Exception as error:
        return [type(error).__name__, str(error)]
    return []


async def describe(**parameters: Any) -> Any:
    """Describe the tools of an instance without a reset."""
    described = await McpTools(**parameters).describe_tools()
    return {"tools": described, "children": list_children()}


async def fail_to_describe(**parameters: Any) -> Any:
    return await catch(McpTools(**parameters).describe_tools())


async def call_all(**parameters: Any) -> Any:
    """Call each tool in its own task. Return the results and errors."""
    tools = McpTools(**parameters)
    await asyncio.create_task(tools.reset(question="?", seed=3))
    results = {
        "sum": await call(tools, "divide", a=3, b=2),
        "variable": await call(tools, "variable", name="COLOR"),
        "header": await call(tools, "header", name="x-color"),
        "captioned": await call(tools, "captioned"),
        "picture": await catch(call(tools, "picture")),
        "failed": await catch(call(tools, "divide", a=1, b=0)),
        "unknown": await catch(call(tools, "multiply")),
        "unsuitable": await catch(call(tools, "add", number="x")),
    }
    await asyncio.create_task(tools.close())
    return results


async def use_two_sessions(**parameters: Any) -> Any:
    """Return the counters of two open sessions, and of a third session that opens after both have closed."""
    first, second, third = (McpTools(**parameters) for _ in range(3))
    await asyncio.gather(first.reset(), second.reset())
    counts = [
        await call(first, "add", number=1),
        await call(second, "add", number=10),
        await call(first, "add", number=1),
        await call(second, "add", number=10),
    ]
    await asyncio.gather(first.close(), second.close())
    await third.reset()
    counts.append(await call(third, "add", number=100))
    await third.close()
    return counts


async def cancel_call(**parameters: Any) -> Any:
    """Cancel a call at its time limit. Make the next call in the same session."""
    tools = McpTools(**parameters)
    await tools.reset()
    before = await call(tools, "add", number=1)
    limited = await catch(asyncio.wait_for(tools.call_tool("wait", {}), BRIEF_S))
    after = await call(tools, "add", number=1)
    await tools.close()
    return [before, limited[0], after]


async def lose_server(**parameters: Any) -> Any:
    """Kill the server during a call. Return the errors of this call, of later calls, and of a new session."""
    tools = McpTools(**parameters)
    await tools.reset()
    process = int(await call(tools, "pid"))
    in_flight = asyncio.create_task(catch(tools.call_tool("wait", {})))
    await asyncio.sleep(BRIEF_S)
    os.kill(process, signal.SIGKILL)
    errors = [await in_flight, *[await catch(call(tools, "add", number=1)) for _ in range(2)]]
    await tools.close()
    new = McpTools(**parameters)
    reset = await catch(new.reset())
    await new.close()
    return {"errors": errors, "reset": reset}


async def lose_server_between_calls(**parameters: Any) -> Any:
    tools = McpTools(**parameters)
    await tools.reset()
    os.kill(int(await call(tools, "pid")), signal.SIGKILL)
    errors = [await catch(call(tools, "add", number=1)) for _ in range(2)]
    await tools.close()
    return errors


async def outlive_server(url: str, restart: list[str]) -> Any:
    """Make a call in a session after another server has replaced the session's server on the same port."""
    tools = McpTools(url=url)
    await tools.reset()
    os.kill(int(await call(tools, "pid")), signal.SIGKILL)
    new = await asyncio.create_subprocess_exec(*restart, stdout=asyncio.subprocess.PIPE)
    assert new.stdout is not None
    await new.stdout.readline()
    error = await catch(call(tools, "add", number=1))
    await tools.reset()  # a retry in a new session
    count = await call(tools, "add", number=1)
    await tools.close()
    new.kill()
    await new.wait()
    return [error, count]


async def close_sessions(**parameters: Any) -> Any:
    """Return the number of child processes while two sessions are open, and after they are closed."""
    sessions = [McpTools(**parameters) for _ in range(2)]
    await asyncio.gather(*(each.reset() for each in sessions))
    num_open = len(list_children())
    await asyncio.gather(*(each.close() for each in sessions))
    again = await catch(sessions[0].call_tool("add", {"number": 1}))
    await sessions[0].close()
    return [num_open, len(list_children()), again]


async def cancel_close(**parameters: Any) -> Any:
    """Cancel a `close` at once. Count the child processes when all tasks have ended."""
    tools = McpTools(**parameters)
    await tools.reset()
    closing = asyncio.create_task(tools.close())
    await asyncio.sleep(0)
    closing.cancel()
    await asyncio.wait(asyncio.all_tasks() - {asyncio.current_task()})
    return [closing.cancelled(), len(list_children())]


async def cancel_reset(**parameters: Any) -> Any:
    """Count the child processes after a `reset` that exceeds its time limit, and after `close`."""
    tools = McpTools(**parameters)
    error = await catch(asyncio.wait_for(tools.reset(), BRIEF_S))
    num_open = len(list_children())
    await tools.close()
    return [error[0], num_open, len(list_children())]


def list_children() -> list[int]:
    tasks = Path(f"/proc/{os.getpid()}/task")
    return [int(pid) for path in tasks.glob("*/children") for pid in path.read_text().split()]


if __name__ == "__main__":
    outcome = asyncio.run(globals()[sys.argv[1]](**json.loads(sys.argv[2])))
    sys.stdout.write(json.dumps(outcome))
