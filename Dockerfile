ARG PYTHON_IMAGE=python:3.11-slim-bookworm

FROM ${PYTHON_IMAGE} AS builder
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore
# The environment gets no pip of its own: the served image installs nothing.
RUN python -m venv --without-pip /opt/venv
WORKDIR /build
COPY pyproject.toml constraints.txt ./
# Packages first and without Headwise itself, so that a change of its code installs none again.
RUN python -c "import tomllib; \
extras = tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']; \
print(*extras['serve-base'], *(r for r in extras['serve'] if not r.startswith('headwise')), sep='\n')" \
    > requirements.txt \
 && pip --python /opt/venv/bin/python install -r requirements.txt -c constraints.txt
COPY . .
# A clone may hold no layers yet, and its files may be closed to other users.
RUN mkdir -p artifacts && chmod -R a+rX artifacts service

FROM ${PYTHON_IMAGE}
ENV PATH=/opt/venv/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    ORT_DISABLE_TELEMETRY=1 \
    HEADWISE_HOST=0.0.0.0 \
    HEADWISE_REPOSITORY=/artifacts
WORKDIR /srv
COPY --from=builder /opt/venv /opt/venv
COPY --from=builder /build/service service
COPY --from=builder /build/artifacts /artifacts
# A number, so that an orchestrator can tell it is not root.
USER 10001:10001
EXPOSE 8000
# http.client, not urllib: a proxy named in the environment must not answer for the service.
HEALTHCHECK --interval=10s --timeout=3s --start-period=30s --retries=3 \
    CMD ["python", "-c", "import http.client, os; c = http.client.HTTPConnection('127.0.0.1', int(os.environ.get('HEADWISE_PORT') or 8000), timeout=2); c.request('GET', '/v2/health/live'); raise SystemExit(c.getresponse().status != 200)"]
ENTRYPOINT ["python", "-m", "service"]
