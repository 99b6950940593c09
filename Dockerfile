# docker build .                                   serves on CPU
# docker build --build-arg PROVIDER=cuda .         serves on CUDA; several GB
# docker build --target export .                   exports layers; holds PyTorch
ARG PYTHON_IMAGE=python:3.11-slim-bookworm

FROM ${PYTHON_IMAGE} AS packages
# Where pip finds packages, PyTorch's CPU build say; by default where it always does.
ARG PIP_INDEX_URL PIP_EXTRA_INDEX_URL PIP_FIND_LINKS
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore
# The environment gets no pip of its own: an image installs nothing once it is built.
RUN python -m venv --without-pip /opt/venv
WORKDIR /build
COPY LICENSE README.md constraints.txt deploy/constraints-cuda.txt pyproject.toml ./
# A stand-in for Headwise itself, so that a change of its code installs no package again.
# What is built of it must go: setuptools takes it for newer than the code.
RUN mkdir export service && echo '__version__ = "0"' >service/__init__.py

FROM packages AS export-packages
RUN pip --python /opt/venv/bin/python install -c constraints.txt '.[export]' \
 && rm -r build
COPY . .
RUN pip --python /opt/venv/bin/python install --no-deps --force-reinstall .

FROM ${PYTHON_IMAGE} AS export
ENV PATH=/opt/venv/bin:$PATH PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 ORT_DISABLE_TELEMETRY=1
COPY --from=export-packages /opt/venv /opt/venv
USER 10001:10001
# Artifacts are published below /artifacts, which is to be mounted.
WORKDIR /
ENTRYPOINT ["python", "-m", "export"]

FROM packages AS serve-packages
ARG PROVIDER=cpu
# Further extras, separated by commas: otel.
ARG EXTRAS
RUN case "$PROVIDER" in cpu) extra=serve ;; cuda) extra=serve-cuda ;; \
        *) echo "PROVIDER: expected cpu or cuda, got $PROVIDER" >&2; exit 1 ;; esac \
 && pip --python /opt/venv/bin/python install -c constraints.txt -c constraints-cuda.txt \
        ".[$extra${EXTRAS:+,$EXTRAS}]" \
 && rm -r build \
 # What serving never imports: tests, compilers of numpy, converters of the runtime.
 && find /opt/venv/lib -type d \( -path '*/numpy/f2py' -o -path '*/numpy/distutils' -o -name tests \
        -o -path '*/onnxruntime/quantization' -o -path '*/onnxruntime/tools' \
        -o -path '*/onnxruntime/transformers' \) -prune -exec rm -r {} +
COPY . .
# A clone may hold no layers yet, and its files may be closed to other users.
RUN pip --python /opt/venv/bin/python install --no-deps --force-reinstall . \
 && mkdir -p artifacts && chmod -R a+rX artifacts

FROM ${PYTHON_IMAGE} AS serve
ARG PROVIDER=cpu
LABEL org.opencontainers.image.title="Headwise" \
      org.opencontainers.image.description="Serves attention layers, head by head, with ONNX Runtime" \
      org.opencontainers.image.version="0.1.0" \
      org.opencontainers.image.licenses="MIT"
ENV PATH=/opt/venv/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    ORT_DISABLE_TELEMETRY=1 \
    HEADWISE_HOST=0.0.0.0 \
    HEADWISE_PROVIDER=$PROVIDER \
    HEADWISE_REPOSITORY=/artifacts
COPY --from=serve-packages /opt/venv /opt/venv
COPY --from=serve-packages /build/artifacts /artifacts
# The standard library's modules that serving and the health check import, compiled once: base
# images hold none compiled, and no later user may write there.
RUN PYTHONDONTWRITEBYTECODE='' python -c 'import service.__main__, service.probe' \
 && rm -rf /tmp/* /root/.cache
# A number, so that an orchestrator can tell it is not root; any other will do.
USER 10001:10001
WORKDIR /tmp
EXPOSE 8000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=10s --start-period=30s --retries=3 \
    CMD ["python", "-m", "service.probe"]
ENTRYPOINT ["python", "-m", "service"]
