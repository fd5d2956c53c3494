"""A graph of LangGraph, with the chat model of LangChain: a model node and a tool node."""

from calculator_task import MAX_TURNS, calculator, reward
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.errors import GraphRecursionError
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition


async def solve(row, base_url):
    tools = [tool(calculator)]
    model = ChatOpenAI(model="gpt-4o", base_url=base_url, api_key="any", max_retries=0)
    bound = model.bind_tools(tools)

    async def call_model(state):
        return {"messages": [await bound.ainvoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    graph.add_node("model", call_model)
    graph.add_node("tools", ToolNode(tools))
    graph.add_edge(START, "model")
    graph.add_conditional_edges("model", tools_condition)
    graph.add_edge("tools", "model")
    limit = {"recursion_limit": 2 * MAX_TURNS}
    try:
        state = await graph.compile().ainvoke({"messages": row["prompt"]}, limit)
    except GraphRecursionError:
        return 0.0
    return reward(state["messages"][-1].content, row)
