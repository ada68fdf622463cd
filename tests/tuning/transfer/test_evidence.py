"""Evidence without a study: what is not known is not said."""

from autoprec.tuning.transfer.evidence import with_evidence
from autoprec.tuning.transfer.plan import transfer
from autoprec.tuning.transfer.proxy import Proxy
from tests.tuning.models import gpt
from tests.tuning.transfer.test_plan import ROWWISE, llama
from tests.tuning.transfer.test_proxy import policy


def test_a_transfer_by_names_alone_claims_no_figures() -> None:
    found = policy(*ROWWISE)
    proxy = Proxy.of(found, gpt())
    result = transfer(found, proxy, llama())
    evidence = with_evidence(result, found, proxy, llama(), "h100", study="", date="2026-11-22").evidence
    assert not {"predicted", "segments", "study"} & set(evidence["transferred_from"])
    assert not {"speedup_over_16bit", "memory_bytes"} & set(evidence)
    assert "nothing was measured" in evidence["limit"]
