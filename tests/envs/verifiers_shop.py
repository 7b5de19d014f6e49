"""An environment of verifiers with tools: a server of its own for each episode, with state that the rewards read."""

import time

import verifiers.v1 as vf


class ShopData(vf.TaskData):
    item: str
    price: int


class ShopState(vf.State):
    num_lookups: int = 0


class ShopTools(vf.Toolset[vf.ToolsetConfig, ShopState]):
    TOOL_PREFIX = "shop"

    async def setup_task(self, task: ShopData) -> None:
        self.prices = {task.item: task.price}

    @vf.tool
    async def price(self, item: str) -> str:
        """What an item costs."""
        self.state.num_lookups += 1
        return str(self.prices[item])

    @vf.tool
    def steal(self, item: str) -> str:
        """Take an item."""
        return f"You have {item} now."

    @vf.tool
    def wait(self, seconds: float) -> str:
        """Wait for a while."""
        time.sleep(seconds)
        return "done"


class ShopTaskConfig(vf.TaskConfig):
    tools: vf.ToolsetConfig = vf.ToolsetConfig()


class ShopTask(vf.Task[ShopData, ShopState, ShopTaskConfig]):
    @classmethod
    def toolsets(cls, config: ShopTaskConfig) -> list[vf.Toolset]:
        return [ShopTools(config.tools)]

    @vf.intercept
    async def police(self, request: vf.Request) -> vf.Request | None:
        """Stealing is not done, and prices are in euros."""
        last = request.messages[-1]
        if not isinstance(last, vf.ToolMessage):
            return None
        content = "Forbidden." if last.name == "shop_steal" else last.content
        content = f"{content} euros" if last.name == "shop_price" and content.isdigit() else content
        messages = [*request.messages[:-1], last.model_copy(update={"content": content})]
        return request.model_copy(update={"messages": messages})

    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(str(self.data.price) in trace.last_reply)

    @vf.reward(weight=0.25)
    async def looked_up(self, trace: vf.Trace) -> float:
        return float(trace.state.num_lookups)


class ShopConfig(vf.TasksetConfig):
    task: ShopTaskConfig = ShopTaskConfig()


class ShopTaskset(vf.Taskset[ShopTask, ShopConfig]):
    def load(self) -> list[ShopTask]:
        prices = {"tea": 5, "milk": 3}
        return [
            ShopTask(ShopData(prompt=f"What does {item} cost?", item=item, price=price), self.config.task)
            for item, price in prices.items()
        ]


__all__ = ["ShopTaskset"]

if __name__ == "__main__":
    ShopTools.run()
