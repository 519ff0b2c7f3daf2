# The experiments, for a CPU; the two commands of README.md.
#
#   docker build -t attention .
#   docker run -v "$PWD/runs:/attention/runs" attention
#   docker run -v "$PWD/runs:/attention/runs" attention \
#     python -m experiments.train --config=configs/numbers.py
#
# With --build-arg EXTRAS=test, `docker run attention pytest -n auto` runs the
# tests; with EXTRAS=experiments,cuda and `docker run --gpus all` it uses GPUs.
FROM python:3.12-slim
WORKDIR /attention
COPY . .
ARG EXTRAS=experiments
RUN pip install --no-cache-dir -e ".[$EXTRAS]"
CMD ["python", "-m", "experiments.train", "--config=configs/reverse.py"]
