# An image in which planaria trains: docker build -t planaria . && docker run --rm -v "$PWD/runs:/work/runs" planaria train demo
FROM python:3.12-slim
COPY pyproject.toml constraints.txt README.md LICENSE /planaria/
COPY src /planaria/src
RUN pip install --no-cache-dir -c /planaria/constraints.txt /planaria && useradd --create-home planaria && install -d -o planaria /work
USER planaria
WORKDIR /work
ENTRYPOINT ["planaria"]
CMD ["--help"]
