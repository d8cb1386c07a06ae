"""Agents that learn at every step, with any estimator that can `advance`.

rows = train_agent(t_maze(10), sg.cells.gru, sg.rtrl, AgentConfig(), rates=[1e-3, 3e-3], seeds=range(5))
"""

from streamgrad_lab.agent.head import actor_critic_head
from streamgrad_lab.agent.learner import Agent, AgentConfig, AgentState, Seen, Totals, make_agent
from streamgrad_lab.agent.runs import final_success, train_agent, windows

__all__ = [
    "Agent",
    "AgentConfig",
    "AgentState",
    "Seen",
    "Totals",
    "actor_critic_head",
    "final_success",
    "make_agent",
    "train_agent",
    "windows",
]
