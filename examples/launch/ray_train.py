"""Train a partitioned model by Ray Train: one worker per GPU, with the process group that TorchTrainer creates."""

MESH, NUM_WORKERS = "dp2,tp4", 8


def train(config: dict) -> None:
    """Train on one worker. Ray has set RANK, LOCAL_RANK and WORLD_SIZE, and initialised torch.distributed."""
    import ray.train
    import torch
    from ray.train.torch import get_device
    from text_setup import rows_of_text, small_llama

    import autopart

    ids = rows_of_text(128)[: config["batch"]].to(get_device())
    model = small_llama("float32").to(get_device())
    pm = autopart.parallelize(model, config["mesh"], example_kwargs={"input_ids": ids, "labels": ids})
    optimizer = torch.optim.AdamW(pm.parameters(), lr=1e-3)
    for _ in range(config["steps"]):
        loss = pm.step(input_ids=ids, labels=ids)
        optimizer.step()
        optimizer.zero_grad()
        ray.train.report({"loss": float(loss)})


if __name__ == "__main__":
    from ray.train import ScalingConfig
    from ray.train.torch import TorchTrainer

    TorchTrainer(
        train,
        train_loop_config={"mesh": MESH, "batch": 64, "steps": 100},
        scaling_config=ScalingConfig(num_workers=NUM_WORKERS, use_gpu=True),
    ).fit()
